"""Study `causes`."""
