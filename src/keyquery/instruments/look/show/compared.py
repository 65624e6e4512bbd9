"""A comparison in the terminal, as a figure and as a page, which opens on what differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyquery.instruments.look.compare import Comparison
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show import triangle
from keyquery.instruments.look.show.figure import FIGURES, svg
from keyquery.instruments.look.show.page import side_of, tab_of
from keyquery.instruments.look.show.shares import has_data
from keyquery.pages.components import heads_frame, key_of, measure, versioned
from keyquery.pages.document import document
from keyquery.support.printable import counted

__all__ = ["FIGURES", "lines", "page", "svg"]
MOVED = {"change": "change of M", "symmetric": "of S", "skew": "of A", "folded": "of M, folded"}


def lines(reading: Comparison) -> list[Any]:
    """The comparison as tables in the terminal."""
    from keyquery.instruments.look.show.terminal import comparison_lines  # which needs rich, as pages do not

    return comparison_lines(reading)


def page(reading: Comparison) -> str:
    """What differs first, then each model."""
    looks = list(reading.looks)
    pictures = [triangle.inline(look) for look in looks]
    tabs = [_difference(reading, number) for number in range(1, len(looks))]
    tabs += [tab_of(look, picture) for picture, look in enumerate(looks)]
    name = " and ".join(str(look.model["name"]) for look in looks)
    return document(name, "comparison of heads", tabs, figures=pictures, style=triangle.STYLE)


def _difference(reading: Comparison, number: int) -> dict[str, Any]:
    """How a later model differs from the first."""
    first, second = reading.looks[0], reading.looks[number]
    change = reading.changes[number - 1] if number <= len(reading.changes) else None
    names = f"{second.model['name']} minus {first.model['name']}"
    tab: dict[str, Any] = {"name": f"difference: {second.model['name']}" if len(reading.looks) > 2 else "difference"}
    tab["facts"] = names
    pairs = _pairs(first, second)
    rows = {(row["layer"], row["head"]): row for row in (change or {}).get("rows") or []}
    sentences = _sentences(change, rows)
    summary = {"type": "summary", "sentences": sentences}
    triangles = [{"type": "triangle", "place": "half", "picture": picture} for picture in (0, number)]
    if not pairs:
        return {
            **tab,
            "blocks": [{"type": "summary", "sentences": [*sentences, "The models have no heads in common."]}],
        }
    measures = [*_moved(rows, pairs), *_shifts(first, second, pairs)]
    at = max(pairs, key=lambda pair: (rows.get(_place(pair[0]), {}).get("change") or 0.0, abs(_shift(pair, "raw"))))
    sides = [
        {
            "type": "bars",
            "size": "half",
            "title": str(look.model["name"]),
            "note": "shares",
            "form": "percent",
            "most": 1,
        }
        for look in (first, second)
    ]
    block_map = {"type": "map", "title": f"Layers by heads: {names}", "quick": [one["key"] for one in measures[:4]]}
    detail = {"type": "detail", "items": [_detail(pair, first, second) for pair in pairs], "blocks": sides}
    items = {"type": "items"}
    notes = versioned(list((change or {}).get("notes", [])), reading.provenance)
    state = {"at": key_of(at[0]), "map": measures[0]["key"]}
    frame = heads_frame([pair[0] for pair in pairs], measures, first.model.get("labels") or [])
    return {
        **tab,
        "frame": frame,
        "state": state,
        "notes": notes,
        "blocks": [summary, block_map, detail, *triangles, items],
    }


def _place(head: Mapping[str, Any]) -> tuple[int, int]:
    return head["layer"], head["head"]


def _pairs(first: Look, second: Look) -> list[tuple[Any, Any]]:
    """The heads that both models have."""
    others = {_place(head): head for head in second.heads}
    return [(head, others[_place(head)]) for head in first.heads if _place(head) in others]


def _sentences(change: Mapping[str, Any] | None, rows: Mapping[Any, Any]) -> list[str]:
    if change is None:
        return []
    sizes = {kind: len(names) for kind, names in change["tensors"].items()}
    total = sizes.get("same", 0) + sizes.get("changed", 0)
    tensors = [f"{sizes.get('same', 0)} of {total} tensors read are identical"]
    tensors += [
        f"{sizes[kind]} only in the {which}"
        for kind, which in (("missing", "first"), ("new", "second"))
        if sizes.get(kind)
    ]
    if change["rows"] is None:
        return [f"The change of heads was not measured: {change.get('why')}.", f"{', '.join(tensors)}."]
    moved = [row for row in rows.values() if row["change"] or row["folded"]]
    if not moved:
        return ["No head differs: all query and key weights are identical.", f"{', '.join(tensors)}."]
    top = max(moved, key=lambda row: row["change"] or row["folded"])
    size = f"{top['change'] or top['folded']:.2g} of ‖M‖"
    heads = f"{len(moved)} of {counted(len(rows), 'head')} differ, {key_of(top)} most ({size})"
    return [f"{heads}.", f"{change['of']} compared with {change['from']}: {', '.join(tensors)}."]


def _moved(rows: Mapping[Any, Any], pairs: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """The change of the weights, if it was measured and there is any."""
    if not any(row["change"] or row["folded"] for row in rows.values()):
        return []
    of = [rows.get(_place(head), {}) for head, _ in pairs]
    return [
        measure(name, label, [row.get(name) for row in of], unit=Comparison.units.get(name), group="of the weights")
        for name, label in MOVED.items()
        if any(row.get(name) is not None for row in of)
    ]


def _shift(pair: tuple[Any, Any], view: str, name: str = "symmetry") -> float:
    before, after = ((head[view] or {}).get(name) for head in pair)
    return 0.0 if before is None or after is None else after - before


def _shifts(first: Look, second: Look, pairs: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Differences of the symmetry in each view, and of the shares on data."""
    out = []
    views = ["raw", "folded", *(["on_data"] if has_data(first) and has_data(second) else [])]
    for view in views:
        names = ["symmetry", *(["symmetric", "skew", "popularity", "position"] if view == "on_data" else [])]
        for name in names:
            values = [_shift(pair, view, name) for pair in pairs]
            words = f"{view.replace('_', ' ')} {name}"
            form = "signed" if name == "symmetry" else "percent"
            unit = "second minus first"
            out.append(
                measure(f"{view}.{name}", f"difference of {words}", values, form=form, unit=unit, group="differences")
            )
    return out


def _detail(pair: tuple[Any, Any], first: Look, second: Look) -> dict[str, Any]:
    """The bars of a head in both models, and its label in both."""
    blocks = []
    for head, look in zip(pair, (first, second), strict=True):
        names = [one["name"] for one in side_of(look)["series"]]
        tones = [one["tone"] for one in side_of(look)["series"]]
        data = head["on_data"]
        if data:
            rows = [[data.get(name), *(data.get("intervals", {}).get(name) or [None, None])] for name in names]
        else:
            share = (1 + head["raw"]["symmetry"]) / 2
            rows = [[share], [1 - share]] if not has_data(look) else []
        blocks.append({"names": names, "tones": tones, "rows": rows})
    labels = [f"{look.model['name']}: {head['label']}" for head, look in zip(pair, (first, second), strict=True)]
    shown = [head["raw"]["symmetry"] for head in pair]
    return {"sentences": [f"{'; '.join(labels)}; raw symmetry {shown[0]:+z.2f} → {shown[1]:+z.2f}."], "blocks": blocks}
