"""Study `circuit`."""
