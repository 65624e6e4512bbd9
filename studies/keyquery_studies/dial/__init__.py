"""Study `dial`."""
