"""Depth against width: the published law, and separation ranks."""
