"""The change of the loss when parts of heads are ablated or scaled, as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.checkpoints.labels import name_of
from keyquery.instruments.ablation.ablate import Ablation
from keyquery.instruments.ablation.dialled import DialEffect
from keyquery.pages.colours import WHOLE

MOST = 48  # rows of a table; if there are more, those with the largest changes


def dial_effect_lines(reading: DialEffect) -> list[Any]:
    """The loss before and after, then sample outputs of the model."""
    gains = ", ".join(f"{part} × {gain:g}" for part, gain in reading.gains.items() if gain != 1) or "all parts × 1"
    where = "all heads" if reading.heads == "all" else f"heads {reading.heads}"
    title = Text(f"{reading.model['name']}: {gains} in {where}", style="bold")
    sure = f"95 % interval {reading.low:+z.3f} to {reading.high:+z.3f}"
    loss = f"loss ({reading.objective}, {reading.sequences} sequences)"
    lines: list[Any] = [
        title,
        f"{loss}: {reading.before:.3f} before, {reading.after:.3f} after; change {reading.change:+z.3f}, {sure}",
    ]
    for sample in reading.samples:
        lines += ["", Text(_one_line(sample["text"]), style="dim")]
        lines += [Text(f"  before  {_one_line(sample['says'])}"), Text(f"  after   {_one_line(sample['turned'])}")]
    return lines


def ablation_lines(reading: Ablation) -> list[Any]:
    """A row per head (or layer), a column per part; changes whose interval excludes 0 are marked."""
    if reading.by == "direction":
        return _direction_lines(reading)
    parts = list(dict.fromkeys(row["part"] for row in reading.rows))
    cells: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in reading.rows:
        cells.setdefault((row["layer"], row["head"]), {})[row["part"]] = row
    places = list(cells)
    cut = len(places) > MOST
    if cut:
        places = sorted(places, key=lambda place: -max(abs(row["change"]) for row in cells[place].values()))[:MOST]
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(reading.by, no_wrap=True)
    for part in parts:
        table.add_column(WHOLE.get(part, part), justify="right")  # wraps the interval in a narrow terminal
    for place in places:
        table.add_row(Text(_name(reading.model, *place)), *(_change(cells[place][part]) for part in parts))
    loss = f"loss {reading.loss:.3f} over {reading.sequences} sequences"
    title = f"{reading.model['name']}: {loss}; change with one part ablated"
    notes = ["", NOTE]
    if cut:
        notes.append(f"The {MOST} of {len(cells)} rows with the largest changes; --csv or --json for all.")
    return [Text(title, style="bold"), table, *notes]


NOTE = "*: the 95 % interval of the change excludes 0; intervals are not corrected for multiple comparisons."
MATRIX = {"singular": "‖M‖²", "symmetric": "‖S‖²", "skew": "‖A‖²"}


def _direction_lines(reading: Ablation) -> list[Any]:
    """A row per direction, the costliest first."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("head", no_wrap=True)
    kind = reading.rows[0]["part"]
    for column in (f"{kind} direction", "value", f"share of {MATRIX[kind]}", "change of the loss"):
        table.add_column(column, justify="right")
    for row in reading.rows[:MOST]:
        numbers = str(row["direction"]), f"{row['value']:.3g}", f"{row['share']:.1%}"
        table.add_row(Text(_name(reading.model, row["layer"], row["head"])), *numbers, _change(row))
    loss = f"loss {reading.loss:.3f} over {reading.sequences} sequences"
    title = f"{reading.model['name']}: {loss}; change with one direction ablated"
    cut = f" The {MOST} costliest of {len(reading.rows)}; --csv or --json for all."
    return [Text(title, style="bold"), table, "", NOTE + (cut if len(reading.rows) > MOST else "")]


def _name(model: Mapping[str, Any], layer: int | None, head: int | None) -> str:
    # The two kernels of an MLA head are changed together.
    return "all" if layer is None else name_of(model, layer, head).replace(" rope", " nope+rope")


def _change(row: Mapping[str, Any]) -> Text:
    half = (row["high"] - row["low"]) / 2
    sure = row["low"] > 0 or row["high"] < 0
    return Text(f"{row['change']:+z.4f} ±{half:.4f}{'*' if sure else ' '}", style="bold" if sure else "dim")


def _one_line(text: str) -> str:
    return " ".join(text.split())
