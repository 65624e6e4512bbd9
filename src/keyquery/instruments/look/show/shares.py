"""Shared by all displays of a look: the parts of a bar, what they are shares of, labels, and the window length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keyquery.forms.parts import PARTS
from keyquery.instruments.look.reading import Look

# Marks behind a label for its evidence; a measured one has none.
EVIDENCE = {"estimated": "~", "weights": "°"}
CHANGES = "†"  # mark of a symmetry whose sign differs between the half and the full window
# Parts of a bar; pairwise stands for symmetric and skew in cross-attention.
BARS = (*PARTS, "pairwise")
OF_DATA, OF_WEIGHTS = "shares of score variance", "‖S‖² and ‖A‖² of the weights, as shares of ‖M‖²"
CLOSE = 0.95  # if the mean length reaches this share of the longest window, the latter is shown


def has_data(look: Look) -> bool:
    """Whether any head was measured on data."""
    return any(head["on_data"] for head in look.heads)


def crossed(look: Look) -> bool:
    """Whether any cross-attention head was measured on data: those have no symmetric and skew part."""
    return any("pairwise" in (head["on_data"] or {}) for head in look.heads)


def part_names(look: Look) -> tuple[str, ...]:
    """The parts of a bar: without data, those of the weights; cross-attention has a pairwise part."""
    return (BARS if crossed(look) else PARTS) if has_data(look) else PARTS[:2]


def with_bars(look: Look) -> list[dict[str, Any]]:
    """The heads whose bars are comparable: for a look on data, those measured on data."""
    return [head for head in look.heads if head["on_data"]] if has_data(look) else look.heads


def bar_shares(head: Mapping[str, Any]) -> list[float]:
    """The parts of a head's bar: shares on data, or ‖S‖² and ‖A‖² of its weights; at least 0, and in sum at most 1."""
    symmetric = (1 + head["raw"]["symmetry"]) / 2
    data = head["on_data"] or {"symmetric": symmetric, "skew": 1 - symmetric}
    shares = [max(data.get(part, 0.0), 0.0) for part in BARS]
    return [share / max(sum(shares), 1.0) for share in shares]  # parts that covary negatively sum to more


def mean_shares(heads: Sequence[Mapping[str, Any]]) -> list[float]:
    """The mean of the bars of several heads."""
    return [sum(values) / len(heads) for values in zip(*map(bar_shares, heads), strict=True)]


def labelled(head: Mapping[str, Any]) -> str:
    """A label with the mark of its evidence."""
    return f"{head['label']}{EVIDENCE.get(head.get('evidence', ''), '')}"


def window(look: Look) -> str | None:
    """The windows that shares were measured on, such as "128-token windows, 160 sequences"; None without data."""
    data = look.provenance.get("data")
    if not data:
        return None
    length, longest = data["length"], data.get("longest", data["length"])
    sequences = f", {data['sequences']:,} sequences" if "sequences" in data else ""
    return f"{longest if length >= CLOSE * longest else length}-token windows{sequences}"


def of_shares(look: Look) -> str:
    """What the bars of a look are shares of, and the window."""
    return f"{OF_DATA}, {window(look)}" if has_data(look) else OF_WEIGHTS


def sample_of(look: Look) -> str:
    """The data of a look: its name, windows and tokens; with means by position, other tokens than the shares are of."""
    data = look.provenance["data"]
    rest = " for the shares, the others for the means" if data.get("means") == "by position" else ""
    return f"{data['from']}: {window(look)}, {data['tokens']:,} tokens{rest}"
