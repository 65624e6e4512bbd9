"""Study `datapoints`."""
