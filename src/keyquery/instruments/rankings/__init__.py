"""Scores of ranked lists."""
