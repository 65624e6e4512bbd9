"""A comparison in the terminal, as a figure and as a page, which opens on what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from keyquery.checkpoints.labels import name_of
from keyquery.instruments.look.compare import Comparison
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show import terminal, triangle
from keyquery.instruments.look.show.page import tab_of
from keyquery.instruments.look.show.shares import (
    BARS,
    OF_WEIGHTS,
    has_data,
    labelled,
    mean_shares,
    window,
    with_bars,
)
from keyquery.instruments.look.show.triangle import FIGURES, svg
from keyquery.pages.components import heads_frame, key_of, measure, versioned
from keyquery.pages.document import document
from keyquery.pages.tables import Text, columns_table
from keyquery.support.printable import counted

__all__ = ["FIGURES", "lines", "page", "svg"]
LISTED = 12  # heads in the ranking
NAMES = 3  # tensors that are listed
SHADES = "░▒▓█"
WIDE = 24  # heads up to which a cell is two characters wide
MOVED = {"change": "change of M", "symmetric": "of S", "skew": "of A", "folded": "of M, folded"}
IDENTICAL = "No head differs: all query and key weights are identical."

# In the terminal


def lines(reading: Comparison) -> list[Any]:
    """Differences, then bars side by side if heads and views are the same, else one look after the other."""
    looks, differences = reading.looks, [*_differences(reading), ""]
    short = list(map(_in_short, looks))
    if len({(len(look.layers), len(look.heads), has_data(look)) for look in looks}) > 1:
        return [*(part for look in looks for part in (*terminal.lines(look), "")), *differences, *short]
    moved = bool(reading.changes) and all(change["rows"] is not None for change in reading.changes)
    if moved and not has_data(looks[0]):
        return [*differences, *short]
    few = len(looks[0].heads) <= terminal.MAX_HEADS
    every = list(zip(*(look.heads if few else look.layers for look in looks), strict=True))
    unequal = [rows for rows in every if any(_values(row) != _values(rows[0]) for row in rows[1:])]
    tables = _side_by_side(looks, unequal, few) if unequal else []
    equal, noun = len(every) - len(unequal), "heads" if few else "layers"
    same = [f"{equal} of {len(every)} {noun} have identical values and are not shown."] if equal else []
    beside = (part for look in looks if few for part in terminal.corpus_table(look))
    return [*differences, *tables, *same, "", *short, *beside]


def _values(row: Mapping[str, Any]) -> Any:
    return row["raw"], row.get("folded"), row.get("on_data")


def _in_short(look: Look) -> str:
    """One line: labels, mean shares, and symmetry of the weights."""
    shares = zip(BARS, mean_shares(with_bars(look)), strict=False)
    listed = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share >= 0.005)
    middle = median(row["raw"]["symmetry"] for row in look.layers)
    of = f"mean shares, {window(look)}" if has_data(look) else OF_WEIGHTS
    counts = terminal.label_counts(look)
    return f"{look.model['name']}: {counts} ({of}: {listed}; raw symmetry of layers, median: {middle:+z.2f})."


def _side_by_side(looks: Sequence[Look], every: list[Any], few: bool) -> list[Any]:
    """Bars, symmetry and labels of the same heads (or layers) of several looks."""
    view = "on_data" if has_data(looks[0]) else "raw"
    over = window(looks[0]) if len({window(look) for look in looks}) == 1 else None
    table = columns_table("head" if few else "layer")
    for look in looks:
        length = (window(look) or "").split(", ")[0]  # beside every share; how many sequences, above the table
        under = f"\n{length if over else window(look) or ''}"
        table.add_column(Text(f"{look.model['name']}{under}".rstrip()))
        table.add_column(f"symmetry\n{view.replace('_', ' ')}", justify="right", no_wrap=True)
        if few:
            table.add_column("label")
    for rows in every:
        cells: list[Any] = [Text(name_of(looks[0].model, rows[0]["layer"], rows[0]["head"] if few else None))]
        for look, row in zip(looks, rows, strict=True):
            heads = [row] if few else [head for head in with_bars(look) if head["layer"] == row["layer"]]
            cells += [terminal.bar_of(heads, look), terminal.symmetry(heads, view), *([labelled(row)] if few else [])]
        table.add_row(*cells)
    return [terminal.legend(looks[0], over), table, *terminal.footnotes(looks, few)]


def _differences(reading: Comparison) -> list[Any]:
    """For each model after the first: its map, its ranking and its tensors, or why they are not available."""
    shown: list[Any] = []
    for number, change in enumerate(reading.changes, 1):
        title = Text(f"{change['of']} compared with {change['from']}", style="bold")
        shown += [*([""] if shown else []), title, *map(Text, _tensors(change["tensors"]))]
        shown += [Text(_unmeasured(change))] if change["rows"] is None else _ranked(reading, number)
        shown += [Text(f"Note: {note}.") for note in change["notes"]]
    return shown


def _tensors(tensors: Mapping[str, list[str]]) -> list[str]:
    """How many tensors are the same, and which are not, in a sentence."""
    if not any(tensors.values()):
        return []
    total = len(tensors["same"]) + len(tensors["changed"])
    sentence = f"{len(tensors['same'])} of {total} tensors read are identical (by digest)"
    groups = {"changed": "differ", "missing": "only in the first", "new": "only in the second"}
    for kind, where in groups.items():
        if names := tensors[kind]:
            more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
            sentence += f"; {len(names)} {where}: {', '.join(names[:NAMES])}{more}"
    return [f"{sentence}."]


def _unmeasured(change: Mapping[str, Any]) -> str:
    return f"The change of heads was not measured: {change.get('why')}."


def _ranked(reading: Comparison, number: int) -> list[Any]:
    """A map of layers by heads, and the heads that changed most."""
    rows, model = reading.ranking(number), reading.looks[number].model
    changed = [row for row in rows if row["change"] or row["folded"]]
    if not changed:
        return [Text(IDENTICAL)]
    view = "change" if changed[0]["change"] else "folded"  # if only norms or biases differ
    largest = max(row[view] or 0.0 for row in rows)
    of = "" if view == "change" else " of the folded weights (only biases or norms differ)"
    steps = [f"{shade} ≤ {_number(largest * (step + 1) / len(SHADES))}" for step, shade in enumerate(SHADES)]
    legend = f"‖ΔM‖/‖M‖ per head{of}, layers by heads: · 0  {'  '.join(steps)}"
    ranked = columns_table("head", "change", "symmetric", "skew", "folded", "raw symmetry, before", "after")
    sides = [{_cell(head): f"{head['raw']['symmetry']:+z.2f}" for head in reading.looks[n].heads} for n in (0, number)]
    for row in changed[:LISTED]:
        symmetry = (side.get(_cell(row), "") for side in sides)
        ranked.add_row(Text(name_of(model, *_cell(row))), *(_number(row[name]) for name in MOVED), *symmetry)
    shown = f"; the {LISTED} that changed most" if len(changed) > LISTED else ""
    summary = f"{len(changed)} of {len(rows)} heads differ{shown}:"
    shaded = _shaded({_cell(row): row[view] for row in rows}, model, largest)
    return [Text(legend), shaded, "", Text(summary), ranked]


def _shaded(changes: Mapping[tuple[int, int], float | None], model: Any, largest: float) -> Any:
    """Shaded cells, one row per layer."""
    columns = 1 + max(head for _, head in changes)
    shown = columns_table("layer", Text(f"heads 0 to {columns - 1}"), "largest")
    for layer in sorted({layer for layer, _ in changes}):
        values = [changes.get((layer, head)) for head in range(columns)]
        line = "".join(_shade(value, largest) * (2 if columns <= WIDE else 1) for value in values)
        shown.add_row(Text(name_of(model, layer)), Text(line), _number(max(value or 0.0 for value in values)))
    return shown


def _shade(value: float | None, largest: float) -> str:
    if value is None:
        return " "
    return "·" if value == 0 else SHADES[min(int(len(SHADES) * value / largest), len(SHADES) - 1)]


def _number(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"


def _cell(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["layer"], row["head"]


# As a page


def page(reading: Comparison) -> str:
    """What differs first, then each model."""
    looks = reading.looks
    tabs = [_difference(reading, number) for number in range(1, len(looks))]
    tabs += [tab_of(look, picture) for picture, look in enumerate(looks)]
    name = " and ".join(str(look.model["name"]) for look in looks)
    pictures = [triangle.inline(look) for look in looks]
    return document(name, "comparison of heads", tabs, figures=pictures, style=triangle.STYLE)


def _difference(reading: Comparison, number: int) -> dict[str, Any]:
    """How a later model differs from the first."""
    first, second = looks = reading.looks[0], reading.looks[number]
    change = reading.changes[number - 1] if number <= len(reading.changes) else {}
    names = f"{second.model['name']} minus {first.model['name']}"
    name = f"difference: {second.model['name']}" if len(reading.looks) > 2 else "difference"
    rows = {_cell(row): row for row in change.get("rows") or []}
    summary = {"type": "summary", "sentences": _sentences(change, rows)}
    others = {_cell(head): head for head in second.heads}
    pairs = [(head, others[_cell(head)]) for head in first.heads if _cell(head) in others]
    if not pairs:
        summary["sentences"] = [*summary["sentences"], "The models have no heads in common."]
        return {"name": name, "facts": names, "blocks": [summary]}
    measures = [*_moved(rows, pairs), *_shifts(looks, pairs)]
    opened, _ = max(pairs, key=lambda pair: (rows.get(_cell(pair[0]), {}).get("change") or 0.0, abs(_shift(pair))))
    tabs = [len(reading.looks) - 1 + picture for picture in (0, number)]  # of the models, after those of differences
    sides = [
        {"type": "shares", "tab": i, "title": str(look.model["name"])} for i, look in zip(tabs, looks, strict=True)
    ]
    return {
        "name": name,
        "facts": names,
        "frame": heads_frame([pair[0] for pair in pairs], measures, first.model.get("labels") or []),
        "state": {"at": key_of(opened), "map": measures[0]["key"]},
        "notes": versioned(list(change.get("notes", [])), reading.provenance),
        "blocks": [
            summary,
            {"type": "map", "title": f"Layers by heads: {names}", "quick": [entry["key"] for entry in measures[:4]]},
            {"type": "detail", "items": [{"sentences": [_labels(pair, looks)], "blocks": sides} for pair in pairs]},
            *({"type": "triangle", "place": "half", "picture": picture} for picture in (0, number)),
            {"type": "items"},
        ],
    }


def _sentences(change: Mapping[str, Any], rows: Mapping[Any, Any]) -> list[str]:
    if not change:
        return []
    moved = [row for row in rows.values() if row["change"] or row["folded"]]
    point = _unmeasured(change) if change["rows"] is None else IDENTICAL
    if moved:
        top = max(moved, key=lambda row: row["change"] or row["folded"])
        size = f"{top['change'] or top['folded']:.2g} of ‖M‖"
        point = f"{len(moved)} of {counted(len(rows), 'head')} differ, {key_of(top)} most ({size})."
    return [point, *_tensors(change["tensors"])]


def _moved(rows: Mapping[Any, Any], pairs: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """The change of the weights, if it was measured and there is any."""
    if not any(row["change"] or row["folded"] for row in rows.values()):
        return []
    of = [rows.get(_cell(head), {}) for head, _ in pairs]
    return [
        measure(name, label, [row.get(name) for row in of], unit=Comparison.units.get(name), group="of the weights")
        for name, label in MOVED.items()
        if any(row.get(name) is not None for row in of)
    ]


def _shift(pair: tuple[Any, Any], view: str = "raw", name: str = "symmetry") -> float:
    before, after = ((head[view] or {}).get(name) for head in pair)
    return 0.0 if before is None or after is None else after - before


def _shifts(looks: Sequence[Look], pairs: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Differences of the symmetry in each view, and of the shares on data."""
    names = [(view, "symmetry") for view in ("raw", "folded")]
    if all(map(has_data, looks)):
        names += [("on_data", name) for name in ("symmetry", "symmetric", "skew", "popularity", "position")]
    measures = []
    for view, name in names:
        facts: dict[str, Any] = {"unit": "second minus first", "group": "differences"}
        facts["form"] = "signed" if name == "symmetry" else "percent"
        shifts = [_shift(pair, view, name) for pair in pairs]
        measures.append(measure(f"{view}.{name}", f"difference of {view.replace('_', ' ')} {name}", shifts, **facts))
    return measures


def _labels(pair: tuple[Any, Any], looks: Sequence[Look]) -> str:
    labels = [f"{look.model['name']}: {head['label']}" for head, look in zip(pair, looks, strict=True)]
    before, after = (head["raw"]["symmetry"] for head in pair)
    return f"{'; '.join(labels)}; raw symmetry {before:+z.2f} → {after:+z.2f}."
