"""Displays of event models."""
