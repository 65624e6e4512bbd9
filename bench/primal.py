"""kq.PrimalAttention, forward and backward with its loss, against softmax attention, a plain statement, and its floor.

On a GPU: bfloat16 autocast, 65,536 tokens, width 512, 8 heads, rank 30. In one run, each round measures all of: the
layer's two projections alone (the floor), the layer, a plain eager statement of it, softmax attention; eager, compiled,
and compiled as one CUDA graph, since eager steps of a millisecond measure how fast kernels are started. Ratios are
within a round, like to like, but for the plain statement. On a CPU: float32, one thread, one sequence. Outputs and
gradients are compared with float64 before anything is timed.

    python bench/primal.py [--out FILE]      what is published
    python bench/primal.py --check           errors only
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import statistics
from functools import partial
from pathlib import Path

import torch
from harness import RESULTS, publish, row, seconds
from torch.nn.functional import linear, normalize

import keyquery as kq

WIDTH, HEADS, RANK, SEED, TOKENS = 512, 8, 30, 0, 65_536
LENGTHS = (1024, 4096, 16_384, 65_536)
SHORT = torch.bfloat16


def make(device, **options):
    torch.manual_seed(SEED)
    return kq.PrimalAttention(WIDTH, HEADS, RANK, device=device, **options)


def plain(layer, x):
    """The layer as its equations stand, in plain eager torch: every feature and score written to memory."""
    query, key = linear(x, layer.query_key.weight, layer.query_key.bias).chunk(2, -1)
    query, key = (t.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for t in (query, key))
    query, key = normalize(query, dim=-1), normalize(key, dim=-1)
    rows = min(10 * RANK, x.shape[1])
    at = torch.linspace(0, x.shape[1] - 1, rows, dtype=torch.float64).long().to(x.device)
    sample = x[:, at].view(len(x), rows, HEADS, -1)
    left, right = (torch.einsum("bnhp,hns->bhps", sample, w[:, :rows]) for w in (layer.we, layer.wr))
    e, r = query @ left, key @ right
    heads = layer.concat(torch.cat((e, r), -1)).transpose(1, 2).flatten(2)
    scale = layer.log_lambda.exp()
    energy = e.square().mean(-2) * scale + r.square().mean(-2) * scale
    objective = energy.sum(-1) / 2 - (layer.we[:, :rows] * layer.wr[:, :rows]).sum((1, 2))
    return layer.output(heads), layer.eta * objective.square().mean()


def stepper(run, weights, device, outputs):
    """One step: forward, and backward from a random gradient; `outputs` are (shape, dtype) or 1 for a loss."""
    given = [torch.ones((), device=device) if o == 1 else torch.randn(*o[0], device=device).to(o[1]) for o in outputs]

    def step():
        with torch.autocast(device, SHORT, enabled=device == "cuda"):
            found = run()
        return torch.autograd.grad(found, weights, given)

    return step


def parts_at(n, tokens, device):
    """What is measured at one length: functions with their inputs, what gradients are of, and shapes of outputs."""
    torch.manual_seed(SEED)
    short = SHORT if device == "cuda" else torch.float32
    shape = (tokens // n, n, WIDTH)
    x = torch.randn(shape, device=device, requires_grad=True)
    middle = torch.randn(shape, device=device).to(short).requires_grad_()
    layer, softmax = make(device), kq.Attention(WIDTH, HEADS, device=device)
    ends = [*layer.query_key.parameters(), *layer.output.parameters()]

    def primal(x):
        return layer(x), layer.regularizer()

    def projections(x, middle):
        return layer.query_key(x), layer.output(middle)

    def attention(x):
        return (softmax(x),)

    double = [((*shape[:2], 2 * WIDTH), short), (shape, short)]
    parts = {
        "projections": (projections, (x, middle), [x, middle, *ends], double),
        "primal": (primal, (x,), [x, *layer.parameters()], [(shape, short), 1]),
        "softmax": (attention, (x,), [x, *softmax.parameters()], [(shape, short)]),
    }
    return layer, x, parts


def compiled_steps(parts):
    """Steps of the compiled functions, by name."""
    steps = {}
    for name, (function, given, weights, outputs) in parts.items():
        fast = torch.compile(function, fullgraph=True, dynamic=False)
        run = partial(fast, *given)
        steps[f"{name} compiled"] = stepper(run, weights, "cuda", outputs)
    return steps


def steps_at(n, tokens, device):
    """What is measured at one length: steps by name."""
    layer, x, parts = parts_at(n, tokens, device)
    steps = {
        name: stepper(partial(function, *given), weights, device, outputs)
        for name, (function, given, weights, outputs) in parts.items()
    }
    steps["plain"] = stepper(partial(plain, layer, x), parts["primal"][2], device, parts["primal"][3])
    if device != "cuda":
        return steps
    torch._dynamo.reset()
    compiled = compiled_steps(parts)
    graphs = {name.replace("compiled", "graphed"): graphed(step) for name, step in compiled.items()}
    return {**steps, **compiled, **graphs}


def graphed(step):
    """The same step as one CUDA graph: what the GPU does, without the time it takes to start many small kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph.replay


def errors(device, run=None, n=700):
    """Relative errors of output, loss and every gradient against float64, and those of the plain statement."""
    torch.manual_seed(SEED)
    layer, x = make(device), torch.randn(3, n, WIDTH, device=device)
    gradient = torch.randn(3, n, WIDTH, device=device)
    exact = copy.deepcopy(layer).double()

    def ours(layer, x):
        return layer(x), layer.regularizer()

    found = {}
    for name, function, own in (("truth", plain, exact), ("plain", plain, layer), ("ours", run or ours, layer)):
        given = x.to(next(own.parameters()).dtype).requires_grad_()
        with torch.autocast(device, SHORT, enabled=device == "cuda" and name != "truth"):
            out, loss = function(own, given)
        parts = torch.autograd.grad((out, 100 * loss), [given, *own.parameters()], (gradient.to(out.dtype), None))
        found[name] = [t.detach().double() for t in (out, loss, *parts)]
    names = ["out", "loss", "x", *(name for name, _ in layer.named_parameters())]
    return {
        name: tuple(float((found[kind][i] - truth).norm() / truth.norm()) for kind in ("ours", "plain"))
        for i, (name, truth) in enumerate(zip(names, found["truth"], strict=True))
    }


def check(device):
    """Errors are at most twice (those of the plain statement in the same precision + rounding)."""
    rounding = torch.finfo(SHORT if device == "cuda" else torch.float32).eps
    compiled = None
    if device == "cuda":
        torch._dynamo.reset()
        compiled = torch.compile(lambda layer, x: (layer(x), layer.regularizer()), fullgraph=True, dynamic=False)
    for kind, run in (("eager", None), ("compiled", compiled)):
        if kind == "compiled" and run is None:
            continue
        for name, (own, other) in errors(device, run).items():
            print(f"{kind} {name}: off by {own:.2g} of float64; plain by {other:.2g}", flush=True)
            assert own <= 2 * (other + rounding), f"{kind} {name} is off by {own:.2g}, plain by {other:.2g}"


def peak(step, device):
    """GiB in use at most during a step."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def rounds_of(steps, rounds, device):
    """Seconds of each step in every round, after a warm-up that also says how often a slow one is worth repeating."""
    times = {}
    for name, step in steps.items():
        for _ in range(3 if device == "cuda" else 1):
            step()
        taken = seconds(step, 1, device)
        times[name] = max(1, min(10, int(0.02 / taken))) if device == "cuda" else 1
    taken = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            taken[name].append(seconds(step, times[name], device))
    return taken


def pairs_of(n, device):
    """What is divided by what, and the goal."""
    if device != "cuda":
        goal = {256: "≥ 0.95 ×", 16_384: "≥ 13 ×"}.get(n, "≥ 1 ×")
        return [
            ("softmax attention over primal layer", "softmax", "primal", goal),
            ("plain statement over primal layer", "plain", "primal", "—"),
            ("primal layer over its projections", "primal", "projections", "—"),
        ]
    return [
        ("primal layer over its projections", "primal graphed", "projections graphed", "≤ 1.25 ×"),
        ("primal layer, without a graph, over its projections", "primal compiled", "projections compiled", "—"),
        ("primal layer, eager, over its projections", "primal", "projections", "—"),
        ("softmax attention over primal layer, both eager", "softmax", "primal", "≥ 1 ×"),
        ("softmax attention over primal layer, both compiled", "softmax compiled", "primal compiled", "≥ 1 ×"),
        ("plain eager statement over primal layer", "plain", "primal graphed", "≥ 4 ×"),
        (
            "softmax attention over primal layer",
            "softmax graphed",
            "primal graphed",
            "≥ 25 ×" if n == 65_536 else "≥ 1 ×",
        ),
    ]


def ratios(taken, n, device):
    """Rows of what is published: medians over rounds, from the first to the last decile."""
    where = f"n = {n:,}, {'H200' if device == 'cuda' else 'CPU'}"
    milliseconds = {name: 1e3 * statistics.median(values) for name, values in taken.items()}
    rows = []
    for what, top, bottom, goal in pairs_of(n, device):
        found = [a / b for a, b in zip(taken[top], taken[bottom], strict=True)]
        spread = statistics.quantiles(found, n=10)
        rows.append(row(f"{what}, {where}", found, "×", goal))
        rows[-1] |= {"low": spread[0], "high": spread[-1], "milliseconds": milliseconds, "n": n}
    for name, mode, goal in (("primal", "eager", "≤ 2.2 ms"), ("primal compiled", "compiled", "≤ 1.4 ms")):
        if device == "cuda":
            found = [1e3 * value for value in taken[name]]
            rows.append({**row(f"primal layer, {mode}, {TOKENS:,} tokens, {where}", found, "ms", goal), "n": n})
    return rows


def measure(lengths, tokens, rounds, device):
    rows, memory = [], {}
    for n in lengths:
        steps = steps_at(n, n if tokens is None else tokens, device)
        few = rounds if n < 4096 or device == "cuda" else 2
        memory[n] = {name: peak(step, device) for name, step in steps.items()}
        taken = rounds_of(steps, few, device)
        for name, values in taken.items():
            room = "" if memory[n][name] is None else f", {memory[n][name]:.2f} GiB"
            print(f"  n = {n:,} {name}: {1e3 * statistics.median(values):.3f} ms{room}", flush=True)
        rows += ratios(taken, n, device)
        del steps
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows, memory


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the results there")
    parser.add_argument("--check", action="store_true", help="errors only")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="on a GPU; other results are kept")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    check(device)
    if options.check:
        return
    facts = {"seed": SEED, "width": WIDTH, "heads": HEADS, "rank": RANK}
    if device == "cuda":
        facts |= {"machine": torch.cuda.get_device_name(), "tokens": TOKENS}
        for n in options.lengths:
            publish_length(n, facts)
    else:
        rows, _ = measure((256, 512, 1024, 4096, 16_384), None, 7, device)
        for found in rows:
            found["shown"] = found.get("n") in (512, 16_384) and found["what"].startswith("softmax")
        publish("primal_cpu", rows, **facts, machine="one CPU thread")
    if options.out is not None:
        shutil.copy(RESULTS / f"primal_{device}.json", options.out)


def publish_length(n, facts):
    """Measure one length on a GPU, and publish it beside the others."""
    rows, memory = measure((n,), TOKENS, 15, "cuda")
    wanted = ("softmax", "primal layer over", f"primal layer, eager, {TOKENS:,}", "primal layer, compiled")
    for found in rows:
        found["shown"] = n in (1024, 65_536) and found["what"].startswith(wanted)
    old = json.loads((RESULTS / "primal_cuda.json").read_text())
    memory = {**old["provenance"].get("peak_gib", {}), **{str(length): peaks for length, peaks in memory.items()}}
    kept = [row for row in old["rows"] if row["n"] != n or "reduce-overhead" in row["what"]]
    rows = sorted(kept + rows, key=lambda row: ("reduce-overhead" not in row["what"], row["n"]))
    publish("primal_cuda", rows, **facts, peak_gib=memory)


if __name__ == "__main__":
    main()
