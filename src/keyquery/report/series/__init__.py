"""Displays of time-series classifiers."""
