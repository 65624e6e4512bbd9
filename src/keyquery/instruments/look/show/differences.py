"""Differences between two models: a map of layers by heads, the heads that changed most, and identical tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyquery.checkpoints.labels import name_of
from keyquery.instruments.look.compare import Comparison
from keyquery.pages.tables import Text, columns_table

MOST = 12  # heads in the ranking
NAMES = 3  # tensors that are listed
SHADES = "░▒▓█"
WIDE = 24  # heads up to which a cell is two characters wide


def difference_lines(reading: Comparison) -> list[Any]:
    """For each model after the first: its map, its ranking and its tensors, or why they are not available."""
    lines: list[Any] = []
    for number, change in enumerate(reading.changes, 1):
        title = Text(f"{change['of']} compared with {change['from']}", style="bold")
        lines += ["" if lines else None, title, *_tensors(change["tensors"])]
        if change["rows"] is None:
            lines.append(Text(f"The change of heads was not measured: {change.get('why')}."))
        else:
            lines += _moved(reading, number)
        lines += [Text(f"Note: {note}.") for note in change["notes"]]
    return [line for line in lines if line is not None]


def _tensors(tensors: Mapping[str, list[str]]) -> list[Any]:
    if not any(tensors.values()):
        return []
    total = len(tensors["same"]) + len(tensors["changed"])
    line = f"{len(tensors['same'])} of {total} tensors read are identical (by digest)"
    groups = {
        "differ": tensors["changed"],
        "only in the first": tensors["missing"],
        "only in the second": tensors["new"],
    }
    for where, names in groups.items():
        if names:
            more = ", …" if len(names) > NAMES else ""
            line += f"; {len(names)} {where}: {', '.join(names[:NAMES])}{more}"
    return [Text(f"{line}.")]


def _moved(reading: Comparison, number: int) -> list[Any]:
    rows, model = reading.ranking(number), reading.looks[number].model
    changed = [row for row in rows if row["change"] or row["folded"]]
    if not changed:
        return [Text("No head differs: all query and key weights are identical.")]
    view = "change" if changed[0]["change"] else "folded"  # if only norms or biases differ
    most = max(row[view] or 0.0 for row in rows)
    of = "" if view == "change" else " of the folded weights (only biases or norms differ)"
    legend = f"‖ΔM‖/‖M‖ per head{of}, layers by heads: · 0  {'  '.join(_steps(most))}"
    cells = {(row["layer"], row["head"]): row[view] for row in rows}
    lines: list[Any] = [Text(legend), _map(cells, model, most), ""]
    ranked = columns_table("head", "change", "symmetric", "skew", "folded", "raw symmetry, before", "after")
    before, after = ({(h["layer"], h["head"]): h for h in reading.looks[n].heads} for n in (0, number))
    for row in changed[:MOST]:
        at = (row["layer"], row["head"])
        symmetry = (f"{side[at]['raw']['symmetry']:+z.2f}" if at in side else "" for side in (before, after))
        cells_of = (_number(row[name]) for name in ("change", "symmetric", "skew", "folded"))
        ranked.add_row(Text(name_of(model, *at)), *cells_of, *symmetry)
    counted = f"{len(changed)} of {len(rows)} heads differ"
    shown = f"; the {MOST} that changed most" if len(changed) > MOST else ""
    return [*lines, Text(f"{counted}{shown}:"), ranked]


def _steps(most: float) -> list[str]:
    return [f"{shade} ≤ {_number(most * (step + 1) / len(SHADES))}" for step, shade in enumerate(SHADES)]


def _map(cells: Mapping[tuple[int, int], float | None], model: Any, most: float) -> Any:
    """Shaded cells, one row per layer."""
    columns = 1 + max(head for _, head in cells)
    shown = columns_table("layer", Text(f"heads 0 to {columns - 1}"), "largest")
    for layer in sorted({layer for layer, _ in cells}):
        values = [cells.get((layer, head)) for head in range(columns)]
        line = "".join(_shade(value, most) * (2 if columns <= WIDE else 1) for value in values)
        shown.add_row(Text(name_of(model, layer)), Text(line), _number(max(value or 0.0 for value in values)))
    return shown


def _shade(value: float | None, most: float) -> str:
    if value is None:
        return " "
    return "·" if value == 0 else SHADES[min(int(len(SHADES) * value / most), len(SHADES) - 1)]


def _number(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"
