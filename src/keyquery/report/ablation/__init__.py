"""Displays of ablations."""
