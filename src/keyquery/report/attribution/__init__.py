"""Displays of attributions and wirings."""
