"""The change of the loss when parts of heads are ablated or scaled, as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from keyquery.checkpoints.labels import name_of
from keyquery.instruments.ablation.ablate import Ablation
from keyquery.instruments.ablation.dialled import DialEffect
from keyquery.report.kit.colours import WHOLE


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
    """How estimates agree with measurements; then a row per head, layer or set, and a column per change."""
    changes = list(dict.fromkeys(row["part"] for row in reading.rows))
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in reading.rows:
        cells.setdefault((row["layer"], row["head"], row.get("key_head"), row.get("set")), {})[row["part"]] = row
    units = list(cells)
    if len(units) > SHOWN:
        units = sorted(units, key=lambda unit: -max(abs(row["change"]) for row in cells[unit].values()))[:SHOWN]
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(reading.by, no_wrap=True)
    for change in changes:
        table.add_column(WHOLE.get(change, change), justify="right")  # wraps the interval in a narrow terminal
    for unit in units:
        shown = (_change(cells[unit][change]) if change in cells[unit] else Text("") for change in changes)
        table.add_row(Text(_name(reading.model, *unit)), *shown)
    loss = f"loss {reading.loss:.3f} over" if reading.loss else ""
    title = f"{reading.model['name']}: {loss} {reading.sequences} sequences; change in {reading.unit}"
    lines = [Text(title, style="bold"), *_agreement(reading), table, "", NOTE, *_counts(reading)]
    if len(units) < len(cells):
        lines.append(f"The {SHOWN} of {len(cells)} rows with the largest changes; --csv or --json for all.")
    return lines


SHOWN = 48  # rows of a table; if there are more, those with the largest changes
NOTE = "*: the 95 % interval of the change excludes 0; intervals are not corrected for multiple comparisons."
WORDS = {"rank_correlation": "rank correlation", "inside": "share of estimates within the noise of the measurement"}


def _agreement(reading: Ablation) -> list[Text]:
    """The check of estimates on this model; a warning above the table where it is poor."""
    if reading.check is None:
        return []
    check = reading.check
    facts = (
        f"rank correlation {check['rank_correlation']:.2f}, slope {check['slope']:.2f}, {check['inside']:.0%} inside"
    )
    lines = [Text(f"estimates against measurements of {check['cells']} cells: {facts} the noise", style="dim")]
    if check["poor"]:
        poor = " and ".join(WORDS[name] for name in check["poor"])
        lines.insert(
            0, Text(f"Estimates are poor for this model and text ({poor}): use --measure all.", style="bold red")
        )
    return lines


def _counts(reading: Ablation) -> list[str]:
    """How many costs are estimated, which are marked ~, and how many cannot be told from the threshold."""
    estimated = sum(row.get("evidence") == "estimated" for row in reading.rows)
    across = sum(row["low"] <= reading.threshold <= row["high"] for row in reading.rows)
    notes = [f"~: estimated, not measured ({estimated} of {len(reading.rows)})."] if estimated else []
    if across:
        notes.append(f"{across} of {len(reading.rows)} intervals contain the threshold of {reading.threshold:g}.")
    return notes


def _name(model: Mapping[str, Any], layer: int | None, head: int | None, key_head: int | None, name: str | None) -> str:
    if layer is None:
        return name or "all"
    if key_head is not None:
        return f"{name_of(model, layer)} key head {key_head}"
    # The two kernels of an MLA head are changed together.
    return name_of(model, layer, head).replace(" rope", " nope+rope")


def _change(row: Mapping[str, Any]) -> Text:
    half = (row["high"] - row["low"]) / 2
    excludes = row["low"] > 0 or row["high"] < 0
    mark = "~" if row.get("evidence") == "estimated" else ""
    text = f"{mark}{row['change']:+z.4f} ±{half:.4f}{'*' if excludes else ' '}"
    return Text(text, style="bold" if excludes else "dim")


def _one_line(text: str) -> str:
    return " ".join(text.split())
