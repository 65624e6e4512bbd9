"""The page of many heads: how large it is, and how long it takes to write, with random figures of every kind in it.

Numbers drawn at random are the worst case: nothing in them repeats.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import cpu_seconds, publish, row

from keyquery.forms.parts import PARTS
from keyquery.instruments.look.reading import Look
from keyquery.pages.document import page
from keyquery.support.files import write_text

TOKENS, REPEATS = 24, 5
PLAIN = (
    "symmetry",
    "column_directionality",
    "column_directionality_norms",
    "symmetric_energy",
    "skew_energy",
    "positive_share",
)


def figures(rank: int) -> dict[str, Any]:
    spectra = {"eigenvalues": 2 * rank, "skew_values": 2 * rank, "singular_values": rank}
    numbers = dict(zip((*PLAIN, "effective_rank", "stable_rank"), torch.rand(8).tolist(), strict=True))
    offsets = {"offset": [0, -1, -2, -4, -8, -16, -32, -64]}
    offsets |= {name: torch.rand(8).tolist() for name in ("contents", "exchange")}
    drawn = {name: torch.randn(size).sort(descending=True).values.tolist() for name, size in spectra.items()}
    return {**numbers, **drawn, "offsets": offsets}


def head(layer: int, number: int, rank: int) -> dict[str, Any]:
    shares = torch.rand(len(PARTS))
    words = [f"token {i}" for i in range(5)]
    on_data = dict(zip(("symmetry", "interaction", *PARTS), [0.5, 0.0, *(shares / shares.sum()).tolist()], strict=True))
    ranks = {"effective_rank_symmetric": 20.123456, "effective_rank_skew": 30.123456}
    sure = {name: [value - 0.1234567, value + 0.1234567] for name, value in (on_data | ranks).items()}
    scores = dict(zip(PARTS, torch.randn(len(PARTS), TOKENS, TOKENS).tolist(), strict=True))
    return {
        "layer": layer,
        "head": number,
        "name": f"layers.{layer}.self_attn.{number}",
        "kind": "self",
        "scale": rank**-0.5,
        "rank": rank,
        "raw": figures(rank),
        "folded": {name: value for name, value in figures(rank).items() if name != "offsets"},
        "on_data": {**on_data, **ranks, "intervals": sure},
        "label": "mixed",
        "reason": "needs position and skew (0.104 nats); all else could go for 0.001",
        "evidence": "estimated",
        "properties": ["low rank 7"],
        "objects": [{"value": 1.234567, "tokens": words, "opposite": words} for _ in range(4)],
        "relations": [{"value": 1.234567, "pairs": [words[:2]] * 5} for _ in range(4)],
        "scores": scores,
    }


def look(layers: int, heads: int, rank: int) -> Look:
    """A rotary decoder, whose heads have the most to show."""
    torch.manual_seed(0)
    raw = {"symmetry": 0.1, "column_directionality": 0.2, "column_directionality_norms": 0.3}
    rows = [
        {"layer": i, "name": f"layers.{i}.self_attn", "kind": "self", "causal": True, "raw": raw} for i in range(layers)
    ]
    return Look(
        model={"name": "many heads", "layers": layers, "width": heads * rank},
        layers=rows,
        heads=[head(layer, number, rank) for layer in range(layers) for number in range(heads)],
        sample={"tokens": [f"token {i}" for i in range(TOKENS)]},
        provenance={"data": {"tokens": 20_000, "length": 128, "from": "text.txt"}},
    )


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for layers, heads, rank, most in ((12, 12, 64, 1), (32, 32, 128, 5)):
            reading, path = look(layers, heads, rank), Path(place) / "page.html"
            seconds = cpu_seconds(lambda: write_text(path, page(reading)), REPEATS)  # noqa: B023
            name = f"page of {layers * heads:,} heads (r {rank}, {TOKENS} tokens)"
            rows.append(row(f"{name}: size", [path.stat().st_size / 1e6], "MB", f"≤ {most} MB"))
            rows.append(row(f"{name}: to write it", seconds, "CPU s", "—"))
    publish("page", rows)


if __name__ == "__main__":
    main()
