"""`ablate` of every head and part of a model of SmolLM2-135M's shape: random weights, 32 windows of 128 tokens.

    python bench/ablate.py                    270 heads; --device cpu --layers 2 --length 8 for a trial

Estimates of all costs, with their operations over those of one run, and measurements. As `keyquery ablate` does by
default, the windows come in two batches. Before it is timed, the changes of some heads are compared with those of the
same model in float64, and with those of one run per ablation. What each of both ways to save work brings is measured on
the middle layer: ablations as one batch, and layers below the ablated one run once.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from typing import Any

import torch
from harness import publish, row
from torch.utils.flop_counter import FlopCounterMode

import keyquery as kq
from keyquery.instruments.ablation import measure
from keyquery.instruments.ablation.measure import Measurement

SEQUENCES, LENGTH = 32, 128
FEW = ["0.1", "29.8"]
GOAL = "≤ 120 s"
ESTIMATE = {"cuda": "≤ 3 s", "cpu": "≤ 150 CPU s"}  # of 16 windows


def smollm(layers: int, device: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        initializer_range=0.04,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).eval()


def timed(model: torch.nn.Module, batches: list[Any], **options: Any) -> tuple[float, list[dict[str, Any]]]:
    start = time.perf_counter()
    rows = kq.ablate(model, batches, **{"measure": "all", **options}).rows
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, [dict(each) for each in rows]


def one_at_a_time(model: torch.nn.Module, batches: list[Any], **options: Any) -> tuple[float, list[dict[str, Any]]]:
    at_once, measure.TOKENS = measure.TOKENS, {}
    try:
        return timed(model, batches, **options)
    finally:
        measure.TOKENS = at_once


def passes(model: torch.nn.Module, batches: list[Any]) -> float:
    """Operations of an estimate over those of one run, with a change that computes no attention anew."""
    with torch.no_grad(), FlopCounterMode(display=False) as once:
        for batch in batches:
            model(**batch)
    with FlopCounterMode(display=False) as estimate:
        kq.ablate(model, batches, changes="zero", measure="none")
    return estimate.get_total_flops() / once.get_total_flops()


def difference(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    return max(abs(a["change"] - b["change"]) for a, b in zip(rows, others, strict=True))


def check(model: torch.nn.Module, batches: list[Any], heads: list[str]) -> None:
    """Changes of some heads, against float64 and against a run per ablation."""
    _, ours = timed(model, batches, heads=heads)
    _, alone = one_at_a_time(model, batches, heads=heads)
    _, exact = timed(model.double(), batches, heads=heads)
    model.float()
    apart, largest = difference(ours, exact), max(abs(each["change"]) for each in exact)
    print(f"changes of up to {largest:.2e} nats differ from float64 by at most {apart:.1e}", flush=True)
    print(f"and from those of a run per ablation by at most {difference(ours, alone):.1e}", flush=True)
    assert max(apart, difference(ours, alone)) < 1e-4, f"changes differ from float64 by {apart:.1e}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda")
    options.add_argument("--layers", type=int, default=30)
    options.add_argument("--length", type=int, default=LENGTH)
    options.add_argument("--no-publish", action="store_true")
    given = options.parse_args()
    model = smollm(given.layers, given.device)
    ids = torch.randint(49152, (SEQUENCES, given.length), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": half} for half in ids.chunk(2)]
    check(model, batches, [head for head in FEW if int(head.split(".")[0]) < given.layers])
    middle = f"{given.layers // 2}.*"
    together, _ = timed(model, batches, heads=middle)
    print(f"middle layer: {together:.2f} s", flush=True)
    half_of_them = batches[:1]  # 16 windows
    estimated, _ = timed(model, half_of_them, measure="none", means="global")
    estimated, _ = timed(model, half_of_them, measure="none", means="global")
    operations = passes(model, half_of_them)
    seconds, rows = timed(model, batches)
    heads = 9 * given.layers
    what = f"`ablate` of {heads} heads × {len(rows) // heads} parts, random weights of SmolLM2-135M's shape"
    what += f", {ids.numel():,} tokens"
    kind = "H200" if given.device == "cuda" else given.device
    figures = [
        row(f"{what}, 16 windows, estimated, float32, {kind}", [estimated], "s", ESTIMATE[given.device]),
        row("operations of the passes of an estimate over those of a run", [operations], "×", "≤ 12 ×"),
        row(f"{what}, measured, float32, {kind}", [seconds], "s", GOAL),
    ]
    together, _ = timed(model, batches, heads=middle)
    alone, _ = one_at_a_time(model, batches, heads=middle)
    below, Measurement._below = Measurement._below, lambda *args: nullcontext()
    whole, _ = one_at_a_time(model, batches, heads=middle)
    Measurement._below = below
    same = "the same of the middle layer"
    figures += [
        row(f"{same}: one run per ablation over many as one batch", [alone / together], "×", "—"),
        row(f"{same}, one run per ablation: whole runs over runs from the ablated layer", [whole / alone], "×", "—"),
    ]
    half, _ = timed(model.bfloat16(), batches)
    figures.append(row(f"{what}, measured, bfloat16, {kind}", [half], "s", GOAL))
    if not given.no_publish:
        publish("ablate_cuda", figures, device=torch.cuda.get_device_name() if given.device == "cuda" else "cpu")


if __name__ == "__main__":
    main()
