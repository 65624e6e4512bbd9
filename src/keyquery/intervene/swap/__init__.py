"""Attention modules replaced by structured ones."""
