"""Displays of the law of depth."""
