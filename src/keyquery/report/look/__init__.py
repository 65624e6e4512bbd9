"""Displays of looks and comparisons."""
