"""Displays of paths beside optimal transport."""
