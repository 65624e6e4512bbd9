"""Which kernels of kq.PrimalAttention pay for themselves: its training step with and without each, on a GPU.

Forward, loss and backward, bfloat16 autocast, width 512, 8 heads, rank 30, 65,536 tokens in sequences of several
lengths. `today` is the layer with all kernels; `scores + sample` is it without those of the whole layer and its loss;
`scores` has the fused pass over q and k only, the rest in plain torch; `plain` and `plain, aligned` are statements of
the layer for torch.compile. Beside them its two projections alone and softmax attention. Each eager, compiled, and both
as one CUDA graph; medians and deciles over rounds in which all are measured.

    python bench/primal_compile.py --out FILE [--seconds 140]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from primal import HEADS, RANK, SHORT, TOKENS, graphed, parts_at, plain, stepper
from torch.nn.functional import linear, pad

from keyquery.learn.layers.primal.dispatch import fused
from keyquery.learn.layers.primal.output import merge, mixing
from keyquery.learn.layers.primal.sample import evenly, project

LENGTHS = (65_536, 16_384, 1024, 4096)


def loss_of(layer, energy, rows, n):
    scale = layer.log_lambda.exp()
    trace = (layer.we[:, :rows] * layer.wr[:, :rows]).sum((1, 2))
    objective = (energy * scale).sum((0, -1)) / (2 * n) - trace
    return layer.eta * objective.square().mean()


def scores_only(layer, x, how):
    """The fused pass over q and k. f(X) by plain autograd, or with its gradient added in place, in torch or Triton."""
    n = x.shape[1]
    place, _ = evenly(n, 10 * RANK, None, x.device)
    directions = layer.directions[:, :, : len(place)]
    if how == "plain":
        qk = layer.query_key(x)
        sample = x.to(SHORT).index_select(1, place).unflatten(-1, (HEADS, -1))
        weights = torch.einsum("brhp,thrs->tbhps", sample, directions.to(SHORT))
    else:
        short = [t.to(SHORT) for t in (x, layer.query_key.weight, layer.query_key.bias)]
        qk, weights = project(*short, place, directions.to(SHORT), None, how)
    qk = qk.unflatten(-1, (2, HEADS, -1))
    out, energy, _ = fused(qk, weights.contiguous(), mixing(layer.concat, layer.directions), None, "cosine", "triton")
    return merge(out, layer.concat, layer.output, None), loss_of(layer, energy, len(place), n)


def aligned(layer, x):
    """The layer in plain torch with what a GPU needs: scores in a multiple of 8, and maps of [e; r] as one product."""
    batch, n, _ = x.shape
    place, _ = evenly(n, 10 * RANK, None, x.device)
    directions = pad(layer.directions[:, :, : len(place)].to(SHORT), (0, -RANK % 8))
    sample = x.to(SHORT).index_select(1, place).unflatten(-1, (HEADS, -1))
    weights = torch.einsum("brhp,thrs->tbhps", sample, directions)
    qk = layer.query_key(x).view(batch, n, 2, HEADS, -1).permute(2, 0, 3, 1, 4)
    norm = qk.float().square().sum(-1, keepdim=True).clamp(min=1e-24).rsqrt()
    scores = ((qk * norm).to(SHORT).flatten(0, 2) @ weights.flatten(0, 2)).unflatten(0, (2, batch, HEADS))
    energy = scores[..., :RANK].float().square().sum(-2)
    mix = pad(layer.concat.weight.unflatten(1, (2, RANK)), (0, -RANK % 8)).flatten(1)
    heads = linear(scores.permute(1, 3, 2, 0, 4).flatten(-2), mix, layer.concat.bias)
    return layer.output(heads.flatten(2)), loss_of(layer, energy, len(place), n)


def statements(n):
    """What is measured: name, function of no arguments, weights, outputs."""
    layer, x, parts = parts_at(n, TOKENS, "cuda")
    primal, given, weights, outputs = parts["primal"]
    functions = {
        "today": partial(primal, *given),
        "scores + sample": partial(scores_only, layer, x, "triton"),
        "scores, in place": partial(scores_only, layer, x, "reference"),
        "scores": partial(scores_only, layer, x, "plain"),
        "plain": partial(plain, layer, x),
        "plain, aligned": partial(aligned, layer, x),
    }
    found = {name: (function, weights, outputs) for name, function in functions.items()}
    for name in ("projections", "softmax"):
        function, given, *rest = parts[name]
        found[name] = (partial(function, *given), *rest)
    return found


def differences(found):
    """The largest relative difference of outputs and gradients from those of the plain statement, per name."""

    def values(function, weights, outputs):
        torch.manual_seed(1)
        given = [torch.randn(*o[0], device="cuda").to(o[1]) if o != 1 else torch.tensor(100.0).cuda() for o in outputs]
        with torch.autocast("cuda", SHORT):
            outs = function()
        return [t.detach().float() for t in (*outs, *torch.autograd.grad(outs, weights, given))]

    truth = values(*found["plain"])
    names = [name for name in found if name not in ("plain", "projections", "softmax")]
    pairs = {name: zip(values(*found[name]), truth, strict=True) for name in names}
    return {name: max(float((a - b).norm() / b.norm()) for a, b in pair) for name, pair in pairs.items()}


def ways(found, n, deadline):
    """Steps by name, of every statement in every way that there is time for."""
    steps = {}
    for name, (function, weights, outputs) in found.items():
        if name in ("plain", "plain, aligned"):
            kinds = {"eager": function} if n == LENGTHS[0] else {}
        else:
            kinds = {"eager": function}
        if name != "softmax" and time.monotonic() < deadline:
            torch._dynamo.reset()
            kinds["compiled"] = torch.compile(function, fullgraph=True, dynamic=False)
            if name in ("today", "scores", "plain, aligned") and n in (1024, 65_536):
                kinds["reduce-overhead"] = torch.compile(
                    function, fullgraph=True, dynamic=False, mode="reduce-overhead"
                )
        for kind, run in kinds.items():
            try:
                step = stepper(run, weights, "cuda", outputs)
                step()
                steps[name, kind] = step
                if kind in ("eager", "compiled"):
                    steps[name, f"{kind}, graph"] = graphed(step)
            except Exception as error:
                print(f"{n} {name} {kind}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return steps


def milliseconds(step, times):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def measure(n, deadline, rounds=15):
    found = statements(n)
    rows = [{"n": n, "off": differences(found)}]
    print(rows[0], flush=True)
    steps, taken = ways(found, n, deadline), {}
    for _ in range(rounds):
        for name, step in steps.items():
            slow = name[0] == "softmax" and n > 4096
            if not (slow and len(taken.get(name, ())) >= 4):
                taken.setdefault(name, []).append(milliseconds(step, 1 if slow else 5))
    for (name, kind), values in taken.items():
        values = values[2:] if len(values) > 4 else values[1:]
        low, *_, high = statistics.quantiles(values, n=10)
        rows.append({"n": n, "what": name, "way": kind, "ms": statistics.median(values), "low": low, "high": high})
        print(f"n = {n:,} {name}, {kind}: {rows[-1]['ms']:.3f} ms ({low:.3f} to {high:.3f})", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=140, help="after which nothing more is compiled")
    options = parser.parse_args()
    deadline, rows = time.monotonic() + options.seconds, []
    for n in LENGTHS:
        if time.monotonic() < deadline:
            rows += measure(n, deadline)
            torch.cuda.empty_cache()
            options.out.write_text(json.dumps({"machine": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
