"""Study `time`."""
