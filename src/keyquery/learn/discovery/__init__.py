"""Causal discovery with hidden causes: tests of independence in, a partial ancestral graph out."""

from keyquery.learn.discovery.pag import Pag

__all__ = ["Pag"]
