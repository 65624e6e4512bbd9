"""Displays of a monitored training."""
