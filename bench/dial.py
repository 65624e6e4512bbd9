"""Dialled attention against the plain fused one: time side by side in one run, and how memory grows with length.

Attention alone, without projections: rotated queries and keys in, outputs out, means known (`data=`) unless said. The
first call after a change also rotates means to all positions, which has a row of its own. With rotary positions a
dialled query is three times as wide as a plain one, without them twice. On a GPU in bfloat16 at 65,536 tokens, else in
float32 on one CPU thread. Each measurement stands between two of the plain one. Before anything is timed, dialled
outputs are compared with scores written out in float64, and the kernel with its reference.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from harness import RESULTS, publish, row, seconds

import keyquery as kq
from keyquery.forms.parts import PARTS, score_parts
from keyquery.intervene.dial.means import Means
from keyquery.intervene.dial.widen import reference
from keyquery.intervene.rewrites import sites_of

HEADS, RANK, SEED = 16, 64, 0
OFF = {"skew": 0.0}


def inputs(batch, n, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [torch.randn(batch, HEADS, n, RANK, device=device, dtype=dtype) for _ in range(3)]


class Attend(torch.nn.Module):
    """A layer without its projections: queries, keys and values in; tokens alone go through all of it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, key=None, value=None):
        """Attend, or the whole layer."""
        return self.layer(x) if key is None else self.layer._attend(x, key, value, None, None, True)[0]


def stepper(layer, tensors):
    def step():
        with torch.no_grad():
            layer(*tensors)

    return step


def check(device):
    """Dialled attention against softmax of the five parts in float64, and the kernel against the reference."""
    torch.manual_seed(SEED)
    rope, gains = kq.Rope(RANK), dict(zip(PARTS, (0.5, 0.0, 2.0, 0.3, 0.7), strict=True))
    layer = Attend(kq.Attention(HEADS * RANK, HEADS, rope=rope, device=device)).eval()
    query, key, value = inputs(2, 200, device)
    data = [{"x": torch.randn(2, 64, HEADS * RANK)}]
    with kq.dial(layer, **gains, data=data, means="global"), torch.no_grad():
        found = layer(query, key, value).double().cpu()
    mean = Means(layer, data, "global").of(sites_of(layer)[0])
    query, key, value = (t.double().cpu() for t in (query, key, value))
    back, places = (rope.rotate(t, -torch.arange(200)) for t in (query, key)), torch.arange(200)
    at_query, at_key = (m.cpu()[0, :, None].expand(-1, 200, -1) for m in (mean.query, mean.key))
    parts = score_parts(*back, at_query, at_key, places, rope)
    scores = sum(gain * part for gain, part in zip(gains.values(), parts, strict=True))
    hidden = torch.ones(200, 200).triu(1).bool()
    truth = (scores / RANK**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ value
    error, limit = float((found - truth).norm() / truth.norm()), 2e-2 if device == "cuda" else 1e-5
    print(f"dialled attention is off by {error:.2g} of float64")
    assert error < limit, "dialled attention is wrong"
    if device == "cuda":
        from keyquery.intervene.dial import widen_triton

        given = torch.randn(4, 2, HEADS, 300, RANK, device=device)
        gains = torch.rand(len(PARTS), HEADS, dtype=torch.float64)
        given, gains = (*given[:2], *given[2:, :1]), gains.cuda()
        ways = [way(*given, gains, 123, True, True) for way in (reference, widen_triton.widen)]
        error = max(float((one - other).abs().max()) for one, other in zip(*ways, strict=True))
        print(f"the kernel is off by {error:.2g} of the reference, float32")
        assert error < 1e-5, "the kernel is wrong"


def ratios(rope, batch, n, device, rounds, times, data=True):
    """Dialled over plain, several times, and milliseconds that the first dialled call takes beyond a later one."""
    torch.manual_seed(SEED)
    layer = Attend(kq.Attention(HEADS * RANK, HEADS, rope=rope, device=device)).eval()
    step = stepper(layer, inputs(batch, n, device))
    batches = [{"x": torch.randn(2, 64, HEADS * RANK)}] if data else None
    found, first = [], []
    for turn in range(rounds + 2):
        before = seconds(step, times, device)
        with kq.dial(layer, **OFF, data=batches, means="global"):
            once = seconds(step, 1, device)
            taken = seconds(step, times, device)
        after = seconds(step, times, device)
        if turn > 1:  # the first two warm up
            found.append(2 * taken / (before + after))
            first.append(1e3 * (once - taken))
    return found, first


def peak(rope, n):
    """Bytes that one dialled call takes at most beyond its inputs."""
    layer = Attend(kq.Attention(HEADS * RANK, HEADS, rope=rope, device="cuda")).eval()
    step = stepper(layer, inputs(1, n, "cuda"))
    with kq.dial(layer, **OFF, data=[{"x": torch.randn(2, 64, HEADS * RANK)}], means="global"):
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held


def measure(tokens, lengths, rounds, times, device):
    rows, rope = [], kq.Rope(RANK)
    where = "H200" if device == "cuda" else "CPU"
    cases = [(n, rope, {}, "") for n in lengths] + [(lengths[1], None, {}, ", no rope")]
    cases += [(lengths[1], rope, {"data": False}, ", means of the batch")]
    for n, turned, options, note in cases:
        goal = ("≤ 3 ×" if note else "≤ 2 ×") if device == "cuda" else "—"
        found, first = ratios(turned, max(tokens // n, 1), n, device, rounds, times, **options)
        shown = device == "cuda" and n == 4096 and not note
        what = f"dialled attention over plain, {tokens:,} tokens, {n:,} a sequence, head width {RANK}, {where}{note}"
        rows.append({**row(what, found, "×", goal), "shown": shown})
        if n == 4096 and not note:
            rows.append({**row(f"first dialled call beyond a later one, {where}", first, "ms", "—"), "shown": False})
    if device == "cuda":
        found, _ = ratios(rope, 1, 4096, device, rounds, times)
        rows.append({**row(f"the same, one sequence of 4,096, {where}", found, "×", "≤ 2.5 ×"), "shown": False})
        grown = [peak(rope, 32_768) / peak(rope, 8192)]
        rows.append(row("memory of dialled attention, 32,768 over 8,192 tokens", grown, "×", "≤ 4 × (linear)"))
        rows[-1]["shown"] = False
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the results there")
    out = parser.parse_args().out
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check(device)
    if device == "cuda":
        rows, name = measure(65_536, (1024, 4096, 16_384), 15, 6, device), torch.cuda.get_device_name()
    else:
        torch.set_num_threads(1)
        rows, name = measure(2048, (256, 1024), 5, 1, device), "one CPU thread"
    publish(f"dial_{device}", rows, seed=SEED, heads=HEADS, machine=name, off=OFF)
    if out is not None:
        shutil.copy(RESULTS / f"dial_{device}.json", out)


if __name__ == "__main__":
    main()
