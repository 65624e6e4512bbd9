"""Study `words`."""
