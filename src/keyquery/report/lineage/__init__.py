"""Displays of `lineage`."""
