"""Displays of cross-modal attention flow."""
