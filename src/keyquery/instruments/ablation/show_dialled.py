"""The loss before and after a dial, in the terminal."""

from __future__ import annotations

from typing import Any

from keyquery.instruments.ablation.dialled import DialEffect
from keyquery.pages.tables import Text


def lines(reading: DialEffect) -> list[Any]:
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


def _one_line(text: str) -> str:
    return " ".join(text.split())
