"""Study `primal`."""
