"""Displays of NPT explanations."""
