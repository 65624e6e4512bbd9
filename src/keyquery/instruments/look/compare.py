"""`compare`: two or more models, or checkpoints of one run, side by side, and how far each head differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from keyquery.checkpoints import Heads, read
from keyquery.instruments.look.difference import compared_tensors, difference
from keyquery.instruments.look.look import look
from keyquery.instruments.look.reading import FORMER, Look
from keyquery.instruments.look.validity import check_changes
from keyquery.reading import Reading, provenance
from keyquery.support.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Comparison(Reading, kind="comparison"):
    """Several looks in the order given, each as the JSON of a Look.

    `changes` has an entry for each look after the first: how far each head has moved from the first (`rows`, or the
    reason `why` there are none), and which `tensors` are the same by digest, changed, missing or new.
    """

    units: ClassVar[Mapping[str, str]] = {
        "change": "‖ΔM‖/‖M‖ of the weights, M that of the first; so are symmetric, ‖ΔS‖/‖M‖, and skew, ‖ΔA‖/‖M‖",
        "folded": "the same of M with biases and norms in it",
    }

    former = FORMER
    readings: Sequence[Mapping[str, Any]]  # each as the JSON of a Look
    changes: Sequence[Mapping[str, Any]] = field(default_factory=list)  # per later look

    def __post_init__(self) -> None:
        super().__post_init__()
        check_changes(self.changes, len(self.readings))

    @property
    def looks(self) -> list[Look]:
        """The readings as Looks."""
        skipped = ("schema", "kind", "units")
        return [Look(**{k: v for k, v in reading.items() if k not in skipped}) for reading in self.readings]

    def ranking(self, number: int = 1) -> list[dict[str, Any]]:
        """Heads of a later look by falling change from the first; empty where the change is unknown.

        >>> before, after = torch.nn.MultiheadAttention(8, 2), torch.nn.MultiheadAttention(8, 2)
        >>> rows = compare(before, after).ranking()
        >>> rows[0]["change"] >= rows[1]["change"] > 0
        True
        """
        rows = self.changes[number - 1]["rows"] if number <= len(self.changes) else None
        return sorted(rows or [], key=lambda row: (-(row["change"] or 0.0), -(row["folded"] or 0.0)))

    def records(self) -> list[dict[str, Any]]:
        """One row per head of each model, with its change where that is known."""
        rows = []
        for number, reading in enumerate(self.looks):
            changed = {(row["layer"], row["head"]): row for row in self.ranking(number)} if number else {}
            for row in reading.records():
                change = changed.get((row["layer"], row["head"]), {})
                own = {f"change_{name}": change.get(name) for name in ("symmetric", "skew", "folded")}
                known = {"change": change.get("change"), **own} if any(c["rows"] for c in self.changes) else {}
                rows.append({"model": reading.model["name"], **row, **known})
        return rows


def compare(*looks: Any, weights: Sequence[Heads] | None = None, progress: Progress | None = None) -> Comparison:
    """Compare models, or checkpoints of one run, head by head.

    The change of a head is ‖ΔM‖/‖M‖, with ‖ΔS‖/‖M‖ and ‖ΔA‖/‖M‖ for its symmetric and skew parts; M is that of the
    first model.

    Parameters
    ----------
    *looks
        Two or more Looks, or anything that `kq.look` takes, such as a path or a live model.
    weights
        One `Heads` (from `kq.read`) per look, from which the change is computed. Default: read from `looks` if none of
        them is a Look; otherwise unknown, and only tensor digests are compared.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    Comparison
        The looks and, for each after the first, its changes. Models of different shapes have no changes per head.

    Raises
    ------
    ValueError
        If there are fewer than two looks, or `weights` has another length.

    Examples
    --------
    >>> reading = kq.look(torch.nn.MultiheadAttention(8, 2), name="small")
    >>> [row["model"]["name"] for row in compare(reading, reading).readings]
    ['small', 'small']

    See Also
    --------
    look : The metrics of one model.
    """
    if len(looks) < 2:
        raise ValueError(f"compare needs at least two models, got {len(looks)}")
    if weights is not None and len(weights) != len(looks):
        raise ValueError(f"weights must have one entry per look, {len(looks)}, got {len(weights)}")
    readings = [source if isinstance(source, Look) else look(source, progress=progress) for source in looks]
    if weights is None and not any(isinstance(source, Look) for source in looks):
        weights = [read(getattr(source, "network_", source)) for source in looks]
    changes = [_change(readings, weights, number, progress) for number in range(1, len(readings))]
    return Comparison(readings=[reading.to_dict() for reading in readings], changes=changes, provenance=provenance())


def _change(looks: list[Look], weights: Sequence[Heads] | None, number: int, progress: Progress | None) -> Any:
    first, other = looks[0], looks[number]
    unknown: dict[str, Any] = {"rows": None, "why": "the weights are not available", "notes": []}
    moved = unknown if weights is None else difference(weights[0], weights[number], progress)
    before, after = (look.provenance.get("tensors") or {} for look in (first, other))
    return {"of": other.model["name"], "from": first.model["name"], **moved, "tensors": compared_tensors(before, after)}
