"""The display functions of each kind of reading, by name and imported on use, so that one kind loads no other."""

from __future__ import annotations

from keyquery.kinds import Kind, imported, kinds
from keyquery.reading import Reading

__all__ = ["display_of", "imported"]


def display_of(reading: Reading) -> Kind:
    """The display of a reading; an unknown kind has an empty one, which shows its records."""
    return kinds().get(reading.kind, Kind(""))
