"""`compare`: two models, or two steps of one, side by side, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from keyquery.checkpoints import Heads, read
from keyquery.instruments.look.difference import compared_tensors, difference
from keyquery.instruments.look.look import FORMER, Look, look
from keyquery.instruments.look.validity import check_changes
from keyquery.reading import Reading, provenance
from keyquery.support.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Comparison(Reading, kind="comparison"):
    """Several looks, in the order given; each is the JSON of a Look.

    `changes` has an entry for each look after the first: how far each head has moved from the first (`rows`, or `why`
    there are none), and which `tensors` are the same by digest, changed, missing or new.
    """

    units: ClassVar[Mapping[str, str]] = {
        "change": "‖ΔM‖/‖M‖ of the weights, M that of the first; so are symmetric, ‖ΔS‖/‖M‖, and skew, ‖ΔA‖/‖M‖",
        "folded": "the same of M with biases and norms in it",
    }

    former = FORMER
    readings: Sequence[Mapping[str, Any]]
    changes: Sequence[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_changes(self.changes, len(self.readings))

    @property
    def looks(self) -> list[Look]:
        """The readings as Looks."""
        skipped = ("schema", "kind", "units")
        return [Look(**{k: v for k, v in reading.items() if k not in skipped}) for reading in self.readings]

    def ranking(self, number: int = 1) -> list[dict[str, Any]]:
        """The heads of a look after the first, those that changed most first; none where that is not known.

        >>> one, two = torch.nn.MultiheadAttention(8, 2), torch.nn.MultiheadAttention(8, 2)
        >>> rows = compare(one, two).ranking()
        >>> rows[0]["change"] >= rows[1]["change"] > 0
        True
        """
        rows = self.changes[number - 1]["rows"] if number <= len(self.changes) else None
        return sorted(rows or [], key=lambda row: (-(row["change"] or 0.0), -(row["folded"] or 0.0)))

    def records(self) -> list[dict[str, Any]]:
        """One row per head of each model, with its change where that is known."""
        found = []
        for number, one in enumerate(self.looks):
            moved = {(row["layer"], row["head"]): row for row in self.ranking(number)} if number else {}
            for row in one.records():
                change = moved.get((row["layer"], row["head"]), {})
                own = {f"change_{name}": change.get(name) for name in ("symmetric", "skew", "folded")}
                known = {"change": change.get("change"), **own} if any(c["rows"] for c in self.changes) else {}
                found.append({"model": one.model["name"], **row, **known})
        return found


def compare(*looks: Any, weights: Sequence[Heads] | None = None, progress: Progress | None = None) -> Comparison:
    """Put looks side by side; whatever else `kq.look` takes, such as a path or a live model, is looked at first.

    How far each head has moved is measured where weights are at hand: those of what is looked at here, or `weights`,
    one Heads for each look. Looks alone say which tensors differ, and models of different shapes are only shown.

    >>> one = kq.look(torch.nn.MultiheadAttention(8, 2), name="one")
    >>> [reading["model"]["name"] for reading in compare(one, one).readings]
    ['one', 'one']
    """
    if len(looks) < 2:
        raise ValueError(f"a comparison needs two looks, got {len(looks)}")
    if weights is not None and len(weights) != len(looks):
        raise ValueError(f"weights must be one for each of {len(looks)} looks, got {len(weights)}")
    found = [one if isinstance(one, Look) else look(one, progress=progress) for one in looks]
    if weights is None and not any(isinstance(one, Look) for one in looks):
        weights = [read(getattr(one, "network_", one)) for one in looks]
    changes = [_change(found, weights, number, progress) for number in range(1, len(found))]
    return Comparison(readings=[one.to_dict() for one in found], changes=changes, provenance=provenance())


def _change(looks: list[Look], weights: Sequence[Heads] | None, number: int, progress: Progress | None) -> Any:
    first, other = looks[0], looks[number]
    unknown: dict[str, Any] = {"rows": None, "why": "the weights are not at hand", "notes": []}
    moved = unknown if weights is None else difference(weights[0], weights[number], progress)
    before, after = (look.provenance.get("tensors") or {} for look in (first, other))
    return {"of": other.model["name"], "from": first.model["name"], **moved, "tensors": compared_tensors(before, after)}
