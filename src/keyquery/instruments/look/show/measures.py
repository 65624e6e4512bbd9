"""The measures of a look's heads, for the map and the table of a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.needs import costs_without
from keyquery.instruments.ablation.show import cost_measures
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show.shares import (
    BARS,
    EVIDENCE,
    OF_DATA,
    OF_WEIGHTS,
    bar_shares,
    crossed,
    has_data,
    window,
)
from keyquery.instruments.roles.show import role_measures
from keyquery.intervene.head_output import KINDS
from keyquery.pages.components import heads_frame, measure

VIEWS = {"raw": "raw", "folded": "folded", "on_data": "on data"}
SIGNED = ("symmetry", "column_directionality")  # from −1 to 1


def part_names(look: Look) -> tuple[str, ...]:
    """The parts of a bar: without data, those of the weights; cross-attention has a pairwise part."""
    return (BARS if crossed(look) else PARTS) if has_data(look) else PARTS[:2]


def part_tones(look: Look) -> list[str]:
    """The colour of every part of a bar."""
    return [f"var(--{part})" for part in part_names(look)]


def label_tone(label: str) -> str:
    """The colour of a label: that of its part, else grey."""
    return f"var(--{label})" if label in BARS else "var(--muted)"


def labelled(head: Mapping[str, Any]) -> str:
    """A label with the mark of its evidence."""
    return head["label"] + EVIDENCE.get(head.get("evidence", ""), "")


def costs_of(head: Mapping[str, Any]) -> dict[str, Any]:
    """The costs that a page shows: of each part left out, and of the whole head."""
    costs = head.get("ablation") or {}
    return {**costs_without(costs), **{kind: costs[kind] for kind in KINDS if kind in costs}}


def frame_of(look: Look) -> dict[str, Any]:
    """Layers by heads with all measures of a look, costs first."""
    measures = [
        *cost_measures([costs_of(head) for head in look.heads]),
        _parts(look),
        *_roles(look),
        *_views(look),
        *_corpus(look),
    ]
    return {
        **heads_frame(look.heads, measures, look.model.get("labels") or []),
        "notes": [labelled(h) for h in look.heads],
    }


def _parts(look: Look) -> dict[str, Any]:
    names = part_names(look)
    shares = [bar_shares(head)[: len(names)] if head["on_data"] or not has_data(look) else None for head in look.heads]
    unit = f"{OF_DATA}, {window(look)}" if has_data(look) else OF_WEIGHTS
    return measure("parts", "parts", shares, digits=3, parts=list(names), tones=part_tones(look), unit=unit)


def _roles(look: Look) -> list[dict[str, Any]]:
    if not any("roles" in head for head in look.heads):
        return []
    return role_measures([head.get("roles") or {} for head in look.heads])


def _views(look: Look) -> list[dict[str, Any]]:
    """The scalar metrics of every view."""
    out = []
    for view, name in VIEWS.items():
        rows = [head[view] or {} for head in look.heads]
        metrics = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, (int, float)))
        for metric in metrics:
            values = [row.get(metric) for row in rows]
            if all(value is None for value in values):
                continue
            facts: dict[str, Any] = {"group": name, "unit": Look.units.get(metric)}
            if any("intervals" in row for row in rows):
                ends = [row.get("intervals", {}).get(metric) or [None, None] for row in rows]
                if any(low is not None for low, _ in ends):
                    facts |= {"low": [low for low, _ in ends], "high": [high for _, high in ends]}
            if metric.startswith(SIGNED):
                facts |= {"form": "signed", "least": -1, "most": 1}
            if metric == "symmetry":
                facts |= {"ends": ["skew", "symmetric"], "short": f"symmetry {name}"}
            if metric in (*BARS, "interaction", "sink"):
                facts |= {"form": "percent"}
            out.append(measure(f"{view}.{metric}", f"{name} {metric.replace('_', ' ')}", values, **facts))
    return out


def _corpus(look: Look) -> list[dict[str, Any]]:
    rows = [head.get("corpus") or {} for head in look.heads]
    names = dict.fromkeys(name for row in rows for name in row)
    group = "compared with the corpus"
    return [
        measure(
            f"corpus.{name}", f"corpus {name.replace('_', ' ')}", [row.get(name) for row in rows], digits=3, group=group
        )
        for name in names
    ]
