"""Study `transport`."""
