"""Displays of the depth-width law."""
