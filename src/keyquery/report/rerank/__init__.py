"""Displays of re-ranked lists."""
