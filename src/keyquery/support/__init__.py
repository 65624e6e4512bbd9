"""Utilities that all packages use: argument checks, files, progress, statistics, text that is safe to print."""
