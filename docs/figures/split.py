"""Draws split.svg: the scores of one planted head on six words, and the three things that make them."""

from __future__ import annotations

from pathlib import Path

import torch

import keyquery as kq

WORDS = ["the", "cat", "sat", "on", "the", "mat"]
CELL, GAP, TOP, LEFT = 26, 68, 74, 44
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 } .note { fill: #59636e } .sign { font-size: 26px }
.cell { stroke: #d1d9e0; stroke-width: 1 } .plus { fill: #2166ac } .minus { fill: #d6701c }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .note { fill: #9198a1 } .cell { stroke: #3d444d }
  .plus { fill: #539bf5 } .minus { fill: #f0883e }
}
"""


def planted_scores() -> list[torch.Tensor]:
    """Similar words score each other, each word attends to the one before it, and all attend to "the"."""
    names = sorted(set(WORDS))
    word = torch.tensor([[w == name for name in names] + [w in ("cat", "mat")] for w in WORDS]).float()
    tokens = torch.cat((word, torch.eye(len(WORDS))), dim=1)
    axes = torch.eye(tokens.shape[1])
    meaning, place = axes[: word.shape[1]], axes[word.shape[1] :]
    form = 0.5 * kq.Form(meaning, meaning) + 1.3 * kq.Form(place[1:], place[:-1]).skew
    popularity = tokens @ axes[names.index("the")] * 0.45
    symmetric, skew = form.symmetric.scores(tokens), form.skew.scores(tokens)
    return [form.scores(tokens) + popularity, symmetric, skew, popularity.expand(len(WORDS), -1)]


def panel(values: torch.Tensor, index: int, title: str, note: str) -> str:
    """One map of query words (rows) and key words (columns)."""
    left = LEFT + index * (len(WORDS) * CELL + GAP)
    width = len(WORDS) * CELL
    parts = [f'<text class="title" x="{left + width / 2}" y="24" text-anchor="middle">{title}</text>']
    parts.append(f'<text class="note" x="{left + width / 2}" y="{TOP + width + 26}" text-anchor="middle">{note}</text>')
    for i, word in enumerate(WORDS):
        middle = (i + 0.5) * CELL
        parts.append(f'<text class="note" x="{left + middle}" y="{TOP - 10}" text-anchor="middle">{word}</text>')
        parts.append(f'<text class="note" x="{left - 8}" y="{TOP + middle + 4}" text-anchor="end">{word}</text>')
        for j in range(len(WORDS)):
            value = float(values[i, j])
            place = f'x="{left + j * CELL}" y="{TOP + i * CELL}" width="{CELL}" height="{CELL}"'
            sign = "plus" if value > 0 else "minus"
            parts.append(f'<rect class="cell {sign}" fill-opacity="{abs(value):.2f}" {place}/>')
    return "\n".join(parts)


def main() -> None:
    """Write the picture beside this file."""
    titles = ("a head's scores", "symmetric", "skew", "popularity")
    notes = ("each query, each key", "S: similarity", "A: direction", "key only")
    panels = [panel(*each) for each in zip(planted_scores(), range(4), titles, notes, strict=True)]
    width = len(WORDS) * CELL
    height, whole = TOP + width + 44, LEFT + 4 * width + 3 * GAP + 14
    signs = [
        f'<text class="sign" x="{LEFT + (i + 1) * width + i * GAP + 8}" y="{TOP + width / 2 + 8}">{sign}</text>'
        for i, sign in enumerate("=++")
    ]
    size = f'viewBox="0 0 {whole} {height}" width="{whole}" height="{height}"'
    label = "The scores of a head are the sum of a symmetric map, a skew map and a map of popular keys"
    body = "\n".join([*panels, *signs])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
    path = Path(__file__).with_suffix(".svg")
    path.write_text(f"{head}\n<style>{STYLE}</style>\n{body}\n</svg>\n")


if __name__ == "__main__":
    main()
