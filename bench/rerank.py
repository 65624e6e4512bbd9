"""Re-ranking: milliseconds a query, against the same network in plain torch, and against diffusion.

Random vectors of 512 dims, 10,000 in the database; the network of the default sizes (width 768, 12 heads, 2 blocks)
with random weights, on lists of K = 1,024 and L = 512. Plain torch takes one query at a time and writes its attention
out: softmax(QKᵀ/√r)V; on a GPU in float32 and, as ours, with blocks in float16. Before anything is timed, scores of
the two are compared, and the lists they give. Diffusion asks its graph, which is known. All take turns; ratios are
within a turn. On a GPU by its own clock, else CPU time of one thread, with fewer queries.

    python bench/rerank.py [--queries N] [--turns N] [--out FILE]
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from harness import RESULTS, publish, row, seconds
from torch.nn.functional import normalize

import keyquery as kq
from keyquery.learn.inputs.vectors import Asked
from keyquery.learn.rerank.search import search

SEED, TOP, ANCHORS, ITEMS, DIM = 0, 1024, 512, 10_000, 512


def data(queries, device):
    """Vectors in loose groups, so that neighbours are not random."""
    generator = torch.Generator().manual_seed(SEED)
    centres = torch.randn(200, DIM, generator=generator)
    groups = torch.randint(200, (ITEMS + queries,), generator=generator)
    vectors = normalize(centres[groups] + torch.randn(ITEMS + queries, DIM, generator=generator), dim=1).to(device)
    return Asked(vectors[ITEMS:].contiguous(), vectors[:ITEMS].contiguous())


def reranker(device):
    model = kq.Reranker(TOP, ANCHORS, device=device)
    torch.manual_seed(SEED)
    model.network_, model.params_ = model._network(ANCHORS, 768).to(device).eval(), model._plain_params()
    with torch.no_grad():  # blocks that do something, unlike fresh ones
        for block in model.network_.blocks:
            for weight in (block.attention.output.weight, block.mlp[-1].weight):
                weight.mul_(5)
    return model


def plain(network, asked, lists):
    """One query at a time, every score written out."""
    found = []
    for query, candidates in zip(asked.queries, lists, strict=True):
        rows = torch.cat((query.unsqueeze(0), asked.database[candidates]))
        x = network.tokens(rows @ rows[:ANCHORS].T)
        for block in network.blocks:
            layer, y = block.attention, block.attention_norm(x)
            q, k, v = (
                part(y).view(len(y), layer.heads, -1).transpose(0, 1) for part in (layer.query, layer.key, layer.value)
            )
            attention = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), -1)
            x = x + layer.output((attention @ v).transpose(0, 1).reshape(len(y), -1))
            x = x + block.mlp(block.mlp_norm(x))
        unit = normalize(x, dim=1)
        found.append(unit[1:] @ unit[0])
    return torch.stack(found)


@torch.no_grad()
def check(model, asked, lists):
    """The two agree: in float64 to rounding, and as they are timed as well as half precision allows."""
    few = Asked(asked.queries[:4], asked.database)
    ours, theirs = model._scores(few, lists[:4]), plain(model.network_, few, lists[:4])
    error, spread = float((ours - theirs).abs().max()), float(theirs.std())
    model.network_.double()
    exact = Asked(few.queries.double(), few.database.double())
    far = float((model._scores(exact, lists[:4]) - plain(model.network_, exact, lists[:4])).abs().max())
    model.network_.float()
    half = asked.queries.is_cuda
    assert far < 1e-10, f"the two differ by {far:.1g} in float64"
    assert error < (1e-3 if half else 1e-5), f"the two differ by {error:.1g}"
    best = [scores.topk(100, dim=1).indices for scores in (ours, theirs)]
    same = sum(len(set(a) & set(b)) for a, b in zip(*(one.tolist() for one in best), strict=True)) / best[0].numel()
    assert same > (0.98 if half else 0.999), f"only {same:.0%} of the first 100 are the same"
    return {"largest difference of scores": error, "spread of scores": spread, "same among the first 100": same}


def halved(network, asked, lists):
    with torch.autocast("cuda", torch.float16):
        return plain(network, asked, lists)


@torch.no_grad()
def measure(queries, turns, device):
    asked, model = data(queries, device), reranker(device)
    lists = search(*asked, TOP)
    agreed = check(model, asked, lists)
    diffusion = kq.DiffusionReranker(TOP, device=device)
    graph = diffusion._graph(asked.database)
    works = {
        "re-ranking": lambda some, of: model._scores(some, of),
        "the same in plain torch, one query at a time": lambda some, of: plain(model.network_, some, of),
        "diffusion on 10,000 items, its graph known": lambda some, of: diffusion._by_graph(some, of, graph, TOP),
    }
    if device == "cuda":
        works["the same in plain torch, blocks in float16"] = lambda some, of: halved(model.network_, some, of)
    for work in works.values():
        work(Asked(asked.queries[:2], asked.database), lists[:2])
    taken = {name: [] for name in works}
    for _ in range(turns):
        for name, work in works.items():
            taken[name].append(1e3 * seconds(lambda work=work: work(asked, lists), 1, device) / queries)
    where = f"{queries:,} queries, K = 1,024, L = 512, {'H200' if device == 'cuda' else 'CPU'}"
    rows = [row(f"{name}: {where}", found, "ms a query", "—") for name, found in taken.items()]
    ours = taken.pop("re-ranking")
    for name, found in taken.items():
        ratios = [other / own for other, own in zip(found, ours, strict=True)]
        goal = "≥ 2 ×" if "plain" in name else "—"
        rows.append(row(f"how many times as fast as {name.removeprefix('the same in ')}: {where}", ratios, "×", goal))
    return rows, agreed


def fitted(folder):
    """Seconds and CPU seconds of `keyquery rerank --fit` at its defaults, on 1,200 vectors, which are re-ranked too."""
    generator = np.random.default_rng(SEED)
    labels = np.repeat(np.arange(60), 20)
    vectors = generator.normal(size=(60, 128))[labels] + 1.5 * generator.normal(size=(1200, 128))
    files = [folder / f"{name}.npy" for name in ("vectors", "labels")]
    for file, values in zip(files, (vectors.astype(np.float32), labels), strict=True):
        np.save(file, values)
    command = [sys.executable, "-m", "keyquery", "rerank", *map(str, (files[0], files[0])), "--fit", str(files[0])]
    start = perf_counter()
    process = subprocess.Popen([*command, "--labels", str(files[1]), "--device", "cpu", "--quiet"])
    _, status, usage = os.wait4(process.pid, 0)
    taken = perf_counter() - start
    assert status == 0, "keyquery rerank failed"
    what = "`keyquery rerank --fit` at its defaults, 1,200 vectors trained on and re-ranked, two cores"
    return [row(what, [taken], "s", "≤ 120 s"), row(what, [usage.ru_utime + usage.ru_stime], "CPU s", "—")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, help="1,000 on a GPU, 8 else")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the results there")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    queries = options.queries or (1000 if device == "cuda" else 8)
    rows, agreed = measure(queries, options.turns, device)
    print(agreed, flush=True)
    if device == "cpu":
        with tempfile.TemporaryDirectory() as place:
            rows += fitted(Path(place))
    machine = torch.cuda.get_device_name() if device == "cuda" else "one CPU thread"
    publish(f"rerank_{device}", rows, seed=SEED, machine=machine, items=ITEMS, dim=DIM, **agreed)
    if options.out is not None:
        shutil.copy(RESULTS / f"rerank_{device}.json", options.out)


if __name__ == "__main__":
    main()
