"""A thousand looks in one process: what the process holds in memory afterwards, against what it held after fifty.

Every look is of another of six sources (both models that ship, on text and from weights alone, a file of random
weights and a live module), is written as JSON and as a page, and is loaded again.
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path

import torch
from harness import publish, row
from safetensors.torch import save_file

import keyquery as kq
from keyquery.pages.document import page

LOOKS, FIRST, EVERY = 1000, 50, 10


def resident() -> float:
    """Megabytes that this process holds."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024


def sources(folder: Path) -> list[dict]:
    torch.manual_seed(0)
    tensors = {f"layers.{i}.self_attn.{r}_proj.weight": torch.randn(64, 64) for i in range(4) for r in "qkvo"}
    save_file(tensors, folder / "model.safetensors")
    on_text = {"text": kq.models.TEXT, "tokens": 256, "length": 32, "sample": 8}
    return [
        {"source": kq.models.ENCODER},
        {"source": kq.models.DECODER, "directions": 1},
        {"source": kq.models.ENCODER, **on_text},
        {"source": kq.models.DECODER, **on_text},
        {"source": folder / "model.safetensors", "heads": 4},
        {"source": torch.nn.TransformerEncoderLayer(64, 4)},
    ]


def main() -> None:
    torch.set_num_threads(1)
    held, start = {}, time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        given = sources(Path(folder))
        for number in range(1, LOOKS + 1):
            reading = kq.look(**given[number % len(given)])
            text = reading.to_json(Path(folder, "look.json"))
            assert kq.Reading.load(Path(folder, "look.json")) == reading
            assert len(page(reading)) > 0
            assert text
            if number >= FIRST and number % EVERY == 0:
                held[number] = resident()
    spent, after = time.process_time() - start, list(held.values())
    publish(
        "soak",
        [
            row(
                f"{LOOKS:,} looks in one process: memory at the end over that after {FIRST}",
                [after[-1] / after[0]],
                "×",
                "0.95 to 1.05",
            ),
            row(f"{LOOKS:,} looks: most memory over that after {FIRST}", [max(after) / after[0]], "×", "≤ 1.05"),
            row("memory held after them", [after[-1]], "MB", "—"),
            row("each look, its JSON and its page", [1000 * spent / LOOKS], "ms", "—"),
        ],
    )


if __name__ == "__main__":
    main()
