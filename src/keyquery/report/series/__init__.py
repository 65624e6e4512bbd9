"""Displays of series classifiers."""
