"""What differs between two models: a map of layers by heads, the heads that changed most, and tensors that did not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.checkpoints.labels import name_of
from keyquery.instruments.look.compare import Comparison
from keyquery.report.kit.tables import columns_table

MOST = 12  # heads that are ranked
NAMES = 3  # tensors that are named
SHADES = "░▒▓█"
WIDE = 24  # heads, up to which a cell is two letters wide


def difference_lines(reading: Comparison) -> list[Any]:
    """For each model after the first: its map, its ranking and its tensors, or why these are not known."""
    lines: list[Any] = []
    for number, change in enumerate(reading.changes, 1):
        title = Text(f"{change['of']} against {change['from']}", style="bold")
        lines += ["" if lines else None, title, *_tensors(change["tensors"])]
        if change["rows"] is None:
            lines.append(Text(f"How far heads moved is not measured: {change.get('why')}."))
        else:
            lines += _moved(reading, number)
        lines += [Text(f"Note: {note}.") for note in change["notes"]]
    return [line for line in lines if line is not None]


def _tensors(found: Mapping[str, list[str]]) -> list[Text]:
    if not any(found.values()):
        return []
    total = len(found["same"]) + len(found["changed"])
    said = f"{len(found['same'])} of {total} tensors that were read are the same (digest)"
    told = {"differ": found["changed"], "only in the first": found["missing"], "only in the second": found["new"]}
    for what, names in told.items():
        if names:
            more = ", …" if len(names) > NAMES else ""
            said += f"; {len(names)} {what}: {', '.join(names[:NAMES])}{more}"
    return [Text(f"{said}.")]


def _moved(reading: Comparison, number: int) -> list[Any]:
    rows, model = reading.ranking(number), reading.looks[number].model
    changed = [row for row in rows if row["change"] or row["folded"]]
    if not changed:
        return [Text("No head differs: the weights of all queries and keys are equal.")]
    view = "change" if changed[0]["change"] else "folded"  # where norms or biases alone differ
    most = max(row[view] or 0.0 for row in rows)
    of = "" if view == "change" else " with biases and norms, which alone differ"
    legend = f"‖ΔM‖/‖M‖ per head{of}, layers by heads: · 0  {'  '.join(_steps(most))}"
    cells = {(row["layer"], row["head"]): row[view] for row in rows}
    lines: list[Any] = [Text(legend), _map(cells, model, most), ""]
    ranked = columns_table("head", "change", "symmetric", "skew", "folded", "raw symmetry, before", "after")
    before, after = ({(h["layer"], h["head"]): h for h in reading.looks[n].heads} for n in (0, number))
    for row in changed[:MOST]:
        at = (row["layer"], row["head"])
        symmetry = (f"{side[at]['raw']['symmetry']:+z.2f}" if at in side else "" for side in (before, after))
        figures = (_figure(row[name]) for name in ("change", "symmetric", "skew", "folded"))
        ranked.add_row(Text(name_of(model, *at)), *figures, *symmetry)
    counted = f"{len(changed)} of {len(rows)} heads differ"
    shown = f"; the {MOST} that changed most" if len(changed) > MOST else ""
    return [*lines, Text(f"{counted}{shown}:"), ranked]


def _steps(most: float) -> list[str]:
    return [f"{shade} ≤ {_figure(most * (step + 1) / len(SHADES))}" for step, shade in enumerate(SHADES)]


def _map(cells: Mapping[tuple[int, int], float | None], model: Any, most: float) -> Table:
    """Shaded cells, a line per layer."""
    columns = 1 + max(head for _, head in cells)
    shown = columns_table("layer", Text(f"heads 0 to {columns - 1}"), "largest")
    for layer in sorted({layer for layer, _ in cells}):
        values = [cells.get((layer, head)) for head in range(columns)]
        line = "".join(_shade(value, most) * (2 if columns <= WIDE else 1) for value in values)
        shown.add_row(Text(name_of(model, layer)), Text(line), _figure(max(value or 0.0 for value in values)))
    return shown


def _shade(value: float | None, most: float) -> str:
    if value is None:
        return " "
    return "·" if value == 0 else SHADES[min(int(len(SHADES) * value / most), len(SHADES) - 1)]


def _figure(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"
