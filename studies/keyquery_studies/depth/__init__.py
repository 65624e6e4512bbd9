"""Study `depth`."""
