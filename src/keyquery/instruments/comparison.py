"""`compare`: two models, or two steps of one, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyquery.instruments.geometry import Look, look
from keyquery.reading import Reading, provenance


@dataclass(frozen=True, kw_only=True)
class Comparison(Reading, kind="comparison"):
    """Several looks, in the order given; each is the JSON of a Look."""

    readings: Sequence[Mapping[str, Any]]

    @property
    def looks(self) -> list[Look]:
        """The readings as Looks."""
        skipped = ("schema", "kind", "units")
        return [Look(**{k: v for k, v in reading.items() if k not in skipped}) for reading in self.readings]

    def records(self) -> list[dict[str, Any]]:
        """One row a head of each model."""
        return [{"model": look.model["name"], **row} for look in self.looks for row in look.records()]


def compare(*looks: Any) -> Comparison:
    """Put looks side by side; whatever else `kq.look` takes, such as a path or a live model, is looked at first.

    >>> one = kq.look(torch.nn.MultiheadAttention(8, 2), name="one")
    >>> [reading["model"]["name"] for reading in compare(one, one).readings]
    ['one', 'one']
    """
    if len(looks) < 2:
        raise ValueError(f"a comparison needs two looks, got {len(looks)}")
    found = [one if isinstance(one, Look) else look(one) for one in looks]
    return Comparison(readings=[one.to_dict() for one in found], provenance=provenance())
