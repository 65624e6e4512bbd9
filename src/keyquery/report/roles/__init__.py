"""Displays of head roles."""
