"""Displays of surveys."""
