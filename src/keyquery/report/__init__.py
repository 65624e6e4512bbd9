"""Displays of each kind of reading: a folder per kind."""
