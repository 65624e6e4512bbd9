"""Attribution and wiring of a real model: CPU time and memory, and its induction circuit, found and ablated.

    python bench/attribution.py MODEL [--part cost] [--part circuit]

`cost`: one head, all pairs of 128 tokens; the wiring of all heads on 20,000 tokens, in a process of its own. `circuit`:
on repeated random tokens, the top key-side source of every induction head, and the head's attention to what followed
the token before, with that path taken out of its keys in the running model, and with random writes of the same size
taken out instead. SmolLM2-135M has 270 heads.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import mean

import torch
from harness import cpu_seconds, publish, row
from torch import nn

import keyquery as kq
from keyquery.listening import attention_maps
from keyquery.listening.hooks import entry
from keyquery.listening.inputs.load import load_model
from keyquery.listening.residual.recording import recording, sources_of

WIRING = """
import pathlib, resource, sys, tempfile, time, torch, keyquery as kq
torch.set_num_threads(1)
text = pathlib.Path(tempfile.mkdtemp(), "text.txt")
text.write_text(2 * kq.models.LONG_TEXT.read_text())  # one copy has 19,000 tokens
start = time.process_time()
reading = kq.wiring(sys.argv[1], text, tokens=20_000)
print(reading.tokens, time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""
INDUCTION = 0.5  # attention to what followed the token before, above which a head is an induction head
HALF = 64  # tokens that are repeated


def cost(path: str) -> list[dict]:
    """CPU seconds of one head, and CPU minutes and GB of the wiring."""
    model, _ = load_model(path)
    ids = torch.randint(1000, 40000, (1, 128), generator=torch.Generator().manual_seed(0))
    one = cpu_seconds(lambda: kq.attribute(model, inputs={"input_ids": ids}, head="18.6"), 3)
    out = subprocess.run([sys.executable, "-c", WIRING, path], capture_output=True, text=True, check=True).stdout
    tokens, spent, memory = map(float, out.split())
    assert tokens > 19_900, tokens
    return [
        row("attribute: one head of SmolLM2-135M, all pairs of 128 tokens", one, "CPU s", "≤ 10"),
        row("wiring: all 270 heads of SmolLM2-135M on 20,000 tokens", [spent / 60], "CPU min", "≤ 10"),
        row("wiring: peak memory of the same, with the model", [memory], "GB", "≤ 2"),
    ]


def circuit(path: str, sequences: int = 4) -> list[dict]:
    """Induction heads, their top key-side source, and what is left of them without it."""
    model, _ = load_model(path)
    half = torch.randint(1000, 40000, (sequences, HALF), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": torch.cat((half, half), 1)}
    maps = attention_maps(model, batch)
    induction = {(layer, h): _induction(m[:, h]) for layer, m in enumerate(maps) for h in range(m.shape[1])}
    previous = {
        f"{layer}.{h}": float(m[:, h].diagonal(-1, -2, -1).mean())
        for layer, m in enumerate(maps)
        for h in range(m.shape[1])
    }
    wiring = kq.wiring(model, inputs=batch)
    kept = []
    for (layer, h), before in sorted(induction.items(), key=lambda item: -item[1]):
        if before < INDUCTION:
            continue
        top = wiring.of(f"{layer}.{h}", "key")[0]
        after, random = ablated(model, batch, layer, h, top["source"])
        kept.append((previous.get(top["source"], 0.0), before, after, random))
        print(
            f"{layer}.{h}: induction {before:.2f}; keys from {top['source']} ({top['share']:.0%} of the variance, "
            f"previous token {previous.get(top['source'], 0):.2f}); without it {after:.2f}, without a random path "
            f"{random:.2f}",
            flush=True,
        )
    return [
        row(f"induction heads of SmolLM2-135M: {what}", [each[at] for each in kept], "attention", goal)
        for at, (what, goal) in enumerate(
            (
                ("previous-token attention of their top key-side source", "> .5"),
                ("their induction attention", "–"),
                ("the same with that path ablated", "near 0"),
                ("the same with a random path of its size ablated", "as before"),
            )
        )
    ]


def ablated(model: nn.Module, batch: dict, layer: int, head: int, source: str) -> tuple[float, float]:
    """Induction attention of a head with a source taken out of its layer's keys, and with a random one of its size."""
    heads = kq.read(model)
    with recording(model, heads, [heads[layer]]) as run:
        write = sources_of(run(batch).of(heads[layer]), heads[layer].name)[source]
    noise = torch.randn(write.shape, generator=torch.Generator().manual_seed(1))
    noise *= write.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    out = []
    for removed in (write, noise):
        module = model.get_submodule(entry(heads[layer], "key"))
        handle = module.register_forward_pre_hook(lambda m, args, removed=removed: (args[0] - removed, *args[1:]))
        out.append(_induction(attention_maps(model, batch)[layer][:, head]))
        handle.remove()
    return out[0], out[1]


def _induction(maps: torch.Tensor) -> float:
    """Mean attention of the second half's tokens to what followed their first occurrence."""
    return float(mean(float(maps[:, query, query - HALF + 1].mean()) for query in range(HALF, 2 * HALF - 1)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--part", action="append", choices=("cost", "circuit"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for part in options.part or ("cost", "circuit"):
        publish(f"attribution_{part}", {"cost": cost, "circuit": circuit}[part](options.model))
