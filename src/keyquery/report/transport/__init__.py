"""Displays of paths compared with optimal transport."""
