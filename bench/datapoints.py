"""Attention between datapoints against a plain statement of the published layers, and the memory of training.

The plain statement is eager torch, straight from the equations: every score is written to memory. It has the weights of
ours (`published=True`), and outputs and gradients are compared in float64 before anything is timed. A step is forward
and backward through all layers, dropout .1 as published; turns alternate, and ratios are within a turn. On a CPU
float32, one thread, CPU seconds; on a GPU float32 and bfloat16 autocast, by its own clock.

Memory is of whole training steps, optimiser and held-out rows included, at their peak: on a GPU what torch allocates,
on a CPU the resident set of a process of its own, less what it was before the table. The estimate that `fit` makes
before the work is held against it.

    python bench/datapoints.py [--device cuda] [--out FILE]      what is published
    python bench/datapoints.py --check                           errors only
    python bench/datapoints.py --speed                           speeds only; other results are kept
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from harness import RESULTS, publish, row, seconds
from torch import nn
from torch.nn.functional import dropout, gelu, layer_norm, linear

from keyquery.learn.inputs.tables import Rows
from keyquery.learn.layers import DatapointEncoder
from keyquery.learn.npt import memory as room
from keyquery.learn.npt.network import TableNetwork
from keyquery.learn.npt.training import Plan, Samples, answers, learn
from keyquery.support.progress import silent

SEED, HEADS, SHARE = 0, 8, 0.1
PROTEIN, BOSTON = (10, 64, 8), (14, 128, 8)  # columns with the target, embedding, depth
SPEED = {
    "cpu": [(64, *PROTEIN), (256, *PROTEIN), (1024, *PROTEIN), (4096, 10, 64, 2), (354, 14, 128, 2)],
    "cuda": [*((n, *PROTEIN) for n in (256, 1024, 4096)), (16_384, 10, 64, 2), (354, *BOSTON)],
}
SHOWN = (354, 4096)  # in the table of all
MEMORY = {"cpu": (512, 1024, 2048), "cuda": (4096, 16_384, 65_536, 100_000)}
ESTIMATES = {  # rows, columns, embedding, depth, attention between rows, and whether layers are computed again
    "cpu": [
        (500, 10, 64, 8, "full", False),
        (500, 10, 64, 8, "induced", False),
        (2000, 10, 64, 4, "full", False),
        (6000, 10, 64, 2, "induced", False),
        (6000, 10, 64, 2, "induced", True),
        (300, 14, 128, 4, "full", False),
        (300, 14, 128, 4, "full", True),
        (4000, 5, 32, 8, "full", False),
        (100, 60, 32, 2, "induced", False),
        (2000, 30, 16, 4, "none", False),
        (2000, 30, 16, 4, "none", True),
        (1000, 20, 32, 8, "induced", True),
    ],
    "cuda": [
        (4096, 10, 64, 8, "full", False),
        (16_384, 10, 64, 8, "full", False),
        (16_384, 10, 64, 8, "full", True),
        (16_384, 10, 64, 8, "induced", False),
        (100_000, 10, 64, 8, "induced", True),
        (354, 14, 128, 8, "full", False),
        (4096, 55, 32, 8, "full", False),
        (4096, 55, 32, 8, "full", True),
        (65_536, 5, 32, 8, "induced", False),
        (30_000, 30, 16, 4, "none", False),
        (4096, 10, 64, 16, "full", True),
    ],
}


class Plain(nn.Module):
    """The published layers as their equations stand."""

    def __init__(self, ours, share):
        super().__init__()
        self.share = share
        self.layers = nn.ModuleList(nn.ParameterDict(weights_of(layer.block)) for layer in ours.layers)

    def forward(self, x):
        """Layers between rows, of width d·e, and between columns, of width e, in turn."""
        n, d, e = x.shape[1:]
        for number, p in enumerate(self.layers):
            tokens = x.reshape(1, n, d * e) if number % 2 == 0 else x.reshape(n, d, e)
            x = self.block(p, tokens).reshape(1, n, d, e)
        return x

    def block(self, p, x):
        """R = W_res X + drop(W_mix concat(drop(A) V)), then R + FF(LN(R))."""
        h = x.shape[-1]
        normed = layer_norm(x, (h,), *p["norm"], 1e-12)
        q, k, v = linear(normed, *p["q"]), linear(x, *p["k"]), linear(x, *p["v"])
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        a = self.drop((q @ k.mT / h**0.5).softmax(-1))
        r = linear(x, *p["res"]) + self.drop(linear((a @ v).transpose(1, 2).flatten(2), *p["mix"]))
        inner = self.drop(gelu(linear(layer_norm(r, (h,), *p["mlp_norm"], 1e-12), *p["up"])))
        return r + self.drop(linear(inner, *p["down"]))

    def drop(self, x):
        """Dropout everywhere, as published."""
        return dropout(x, self.share, self.training)


def weights_of(block):
    own = block.attention
    parts = {"q": own.query, "k": own.key, "v": own.value, "mix": own.output, "res": block.residual}
    parts |= {"up": block.mlp[0], "down": block.mlp[3], "norm": block.attention_norm, "mlp_norm": block.mlp_norm}
    copies = {name: (part.weight.detach().clone(), part.bias.detach().clone()) for name, part in parts.items()}
    return {name: nn.ParameterList(map(nn.Parameter, pair)) for name, pair in copies.items()}


def pair_of(columns, embedding, depth, share, device, dtype=torch.float32):
    """Ours and the plain statement, with the same weights."""
    torch.manual_seed(SEED)
    ours = DatapointEncoder(columns, embedding, depth, HEADS, published=True, dropout=share)
    return ours.to(device, dtype), Plain(ours, share).to(device, dtype)


def check(device):
    """Outputs and gradients of both, from the same weights, in float64."""
    ours, plain = pair_of(5, 16, 4, 0.0, device, torch.float64)
    x = torch.randn(1, 300, 5, 16, device=device, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    outs = [model(x) for model in (ours, plain)]
    assert (outs[0] - outs[1]).abs().max() < 1e-10, "the layers are not those that were published"
    pairs = [dict(model.named_parameters()) for model in (ours, plain)]
    grads = [torch.autograd.grad((out * weight).sum(), x)[0] for out in outs]
    assert (grads[0] - grads[1]).abs().max() < 1e-9, "gradients are not those of the published layers"
    assert sum(w.numel() for w in pairs[0].values()) == sum(w.numel() for w in pairs[1].values())
    print(f"the same to {(outs[0] - outs[1]).abs().max():.1e}, gradients to {(grads[0] - grads[1]).abs().max():.1e}")
    if device == "cuda":  # tall tables have kernels of their own in float32
        ours, plain = pair_of(5, 16, 2, 0.0, device)
        x = torch.randn(1, 1100, 5, 16, device=device, requires_grad=True)
        found = torch.autograd.grad(ours(x).square().sum(), [x, *ours.parameters()])
        ours, wide = ours.double(), x.detach().double().requires_grad_()
        truth = torch.autograd.grad(ours(wide).square().sum(), [wide, *ours.parameters()])
        least = 1e-3 * max(t.norm() for t in truth)  # gradients of biases of keys are 0
        error = max(float((a - b).norm() / b.norm().clamp(min=least)) for a, b in zip(found, truth, strict=True))
        print(f"gradients in float32, 1,100 rows: off by {error:.1e} of float64")
        assert error < 2e-5, "gradients in float32 are wrong"


def stepper(model, x, gradient, device, short):
    weights = [x, *model.parameters()]

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=short):
            out = model(x)
        return torch.autograd.grad(out, weights, gradient.to(out.dtype))

    return step


def peak(step):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def speed(device):
    """Rows a second of both, and how many times as many ours are."""
    rows = []
    for n, columns, embedding, depth in SPEED[device]:
        for short in (False, True) if device == "cuda" else (False,):
            models = pair_of(columns, embedding, depth, SHARE, device)
            x = torch.randn(1, n, columns, embedding, device=device, requires_grad=True)
            steps = [stepper(model, x, torch.randn_like(x), device, short) for model in models]
            memory = [None, None]
            for number, step in enumerate(steps):
                step()
                memory[number] = peak(step) if device == "cuda" else None
            once = max(seconds(step, 1, device) for step in steps)
            budget = 0.6 if device == "cuda" else 12
            turns = int(min(max(budget / 2 / once, 3), 15))
            times = max(int(0.02 / once), 1) if device == "cuda" else 1
            taken = [[seconds(step, times, device) for step in steps] for _ in range(turns)]
            kind = "bfloat16" if short else "float32"
            shape = f"{n:,} × {columns} table, embedding {embedding}, depth {depth}, {kind}, {where(device)}"
            facts = {"rows": n, "columns": columns, "embedding": embedding, "depth": depth, "kind": kind}
            facts |= {"a_second": [n / statistics.median(each) for each in zip(*taken, strict=True)], "gib": memory}
            rows.append(
                row(f"published layers, ours over plain torch: {shape}", [b / a for a, b in taken], "×", "≥ 1 ×")
            )
            rows[-1] |= facts | {"shown": n in SHOWN}
            print(
                f"  rows a second: {facts['a_second'][0]:,.0f} and {facts['a_second'][1]:,.0f}; GiB {memory}",
                flush=True,
            )
            del models, steps
            release(device)
    return rows


def release(device):
    gc.collect()  # what a training left in cycles would be freed within the next one
    if device == "cuda":
        torch.cuda.empty_cache()


def one_training(rows, columns, embedding, depth, kind, device, thrifty=False):
    """Peak bytes of two training steps, with an eighth more rows held out; seconds of one, its validation included."""
    samples = samples_of(rows, columns, device)
    trained(samples_of(16, 2, device), 8, 2, kind, device, thrifty)  # what torch loads on its first step is no table's
    before, clock = begin(device), time.perf_counter if device == "cuda" else time.process_time
    start = clock()
    trained(samples, embedding, depth, kind, device, thrifty)
    return end(device) - before, (clock() - start) / 2


def samples_of(rows, columns, device):
    total = rows + rows // 8
    numbers = torch.randn(total, columns, generator=torch.Generator().manual_seed(SEED))
    hidden = torch.zeros(total, columns, dtype=torch.bool)
    table = Rows(numbers, torch.zeros(total, columns, dtype=torch.long), hidden).to(device)
    return Samples(table, np.arange(rows), np.arange(rows, total), np.arange(0))


def trained(samples, embedding, depth, kind, device, thrifty):
    columns = samples.rows.hidden.shape[1]
    network = TableNetwork((0,) * columns, embedding, depth, HEADS, rows=kind, dropout=SHARE, thrifty=thrifty)
    most, room.CHUNKS = room.CHUNKS, room.CHUNK  # of predictions, which on a GPU would take half of what is free
    history = learn(network.to(device), samples, Plan(), 2, None, SEED, silent)
    room.CHUNKS = most
    assert np.isfinite(history[-1]["loss"]), "the loss is not finite"


def begin(device):
    """Bytes in use, and peaks counted from here on."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def end(device):
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return status("VmHWM")


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measured(shape, device, thrifty=False):
    """`one_training`, on a CPU in a process of its own."""
    if device == "cuda":
        release(device)
        found = one_training(*shape, device, thrifty)
        release(device)
        return found
    command = [sys.executable, __file__, "--one", *map(str, shape), *(["--thrifty"] if thrifty else [])]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return tuple(json.loads(told.splitlines()[-1]))


def estimates(device):
    """What `fit` says that it needs, over what it takes."""
    rows = []
    for *shape, thrifty in ESTIMATES[device]:
        n, columns, embedding, depth, kind = shape
        said = room.needed(columns, embedding, depth, HEADS, 0, n, kind, device)[thrifty]
        took, _ = measured(shape, device, thrifty)
        what = f"{n:,} × {columns}, embedding {embedding}, depth {depth}, {kind}{', thrifty' if thrifty else ''}"
        told = row(f"estimate of memory over the peak: {what}, {where(device)}", [said / took], "×", "0.77 to 1.3 ×")
        rows.append(told | {"shape": shape, "thrifty": thrifty, "gb": took / 1e9, "shown": False})
        print(f"  {took / 1e9:.3f} GB", flush=True)
    ratios = [r["value"] for r in rows]
    print(f"estimates: {min(ratios):.2f} to {max(ratios):.2f} of the peak", flush=True)
    return rows


def memory(device):
    """Peaks over the number of rows, of a table like Protein, through all rows and through points."""
    rows = []
    for n in MEMORY[device]:
        for kind in ("full", "induced"):
            if device == "cuda" and kind == "full" and n > 20_000:
                continue  # quadratic in time
            took, each = measured((n, *PROTEIN, kind), device)
            told = row(f"memory of training, {n:,} rows, {kind}, {where(device)}", [took / 1e9], "GB", "—")
            rows.append(told | {"rows": n, "kind": kind, "seconds": each, "shown": False})
    return rows


def prediction(device):
    """Rows predicted a second, by as many at a time as there is room for, over 64 at a time."""
    if device == "cpu":
        return []  # where it is always 64
    torch.manual_seed(SEED)
    columns, embedding, depth = PROTEIN
    network = TableNetwork((0,) * columns, embedding, depth, HEADS).to(device).eval()
    context, asked = samples_of(4096, columns, device).rows, samples_of(16_384, columns, device).rows
    memories, most = network.memories(context.within()), room.CHUNKS
    taken, said = [], []
    for _ in range(4):
        turn = []
        for size in (most, room.CHUNK):
            room.CHUNKS = size
            turn.append(seconds(lambda: said.append(answers(network, asked, memories)), 1, device))
        taken.append(turn)
    off = max(float((said[0] - other).abs().max()) for other in said)
    room.CHUNKS = most
    ratios = [b / a for a, b in taken[1:]]
    told = row(f"predictions by room over 64 at a time, {where(device)}", ratios, "×", "≥ 1 ×")
    rate = len(asked.hidden) / statistics.median(a for a, _ in taken[1:])
    print(f"  {rate:,.0f} rows a second; results differ by {off:.1e}", flush=True)
    return [told | {"a_second": rate, "off": off}]


def where(device):
    return "H200" if device == "cuda" else "CPU"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="also write the results there")
    parser.add_argument("--check", action="store_true", help="errors only")
    parser.add_argument("--speed", action="store_true", help="speeds only; other results are kept")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--thrifty", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = options.device
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    if options.one:
        *sizes, kind = options.one
        return print(json.dumps(one_training(*map(int, sizes), kind, device, options.thrifty)))
    check(device)
    if options.check:
        return None
    rows = speed(device)
    if options.speed:
        kept = json.loads((RESULTS / f"datapoints_{device}.json").read_text())["rows"]
        rows += [old for old in kept if not old["what"].startswith("published layers")]
    else:
        rows += [*prediction(device), *memory(device), *estimates(device)]
    machine = torch.cuda.get_device_name() if device == "cuda" else "one CPU thread"
    publish(f"datapoints_{device}", rows, seed=SEED, machine=machine, heads=HEADS, dropout=SHARE)
    if options.out is not None:
        shutil.copy(RESULTS / f"datapoints_{device}.json", options.out)
    return None


if __name__ == "__main__":
    main()
