"""Study `objectives`."""
