"""Shared by all displays: colours, tables, figures, and the frame of an HTML page."""
