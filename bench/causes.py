"""Causal discovery: ICD against the FCI of causal-learn, on the same correlations, in one run.

60 random graphs of 30 nodes, mean degree 2.2, weights 0.4 to 0.9, attention (I − G)⁻¹ with rows that sum to 1; level
0.01. causal-learn gets data of 768 rows whose correlations are exactly those of the attention, which is checked. At 768
samples both err, each in its way: how their edges compare with each other's and with the truth is in the results. At
1e10 samples tests do not err, and the skeletons must be equal; causal-learn is then told that its data have so many
rows. Turns alternate; ratios are within a turn. One thread, CPU seconds.

    python bench/causes.py [--graphs 60] [--turns 3]       # needs the extra fci: make bench-causes
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time

import numpy as np
import torch
from harness import publish, row

from keyquery.learn.discovery.independence import PartialCorrelation, correlation_of
from keyquery.learn.discovery.search import search

SEED, NODES, DEGREE, ALPHA, ROWS = 0, 30, 2.2, 0.01, 768
SAMPLES = {"768": 768, "1e10": 1e10}


def model(rng):
    """The edges of a random graph, and the correlations of its attention."""
    linked = np.tril(rng.random((NODES, NODES)) < DEGREE / (NODES - 1), -1)
    solved = np.linalg.inv(np.eye(NODES) - linked * rng.uniform(0.4, 0.9, (NODES, NODES)))
    edges = {(int(parent), int(child)) for child, parent in np.argwhere(linked)}
    return edges, correlation_of(solved / solved.sum(1, keepdims=True))


def data_of(correlation, rng):
    """Rows whose correlations are exactly these."""
    drawn = rng.normal(size=(ROWS, NODES))
    basis, _ = np.linalg.qr(drawn - drawn.mean(0))
    data = basis @ np.linalg.cholesky(correlation).T
    assert np.abs(np.corrcoef(data.T) - correlation).max() < 1e-12, "the data do not have these correlations"
    return data


def ours(correlation, samples):
    return set(search(PartialCorrelation(correlation, samples, ALPHA)).graph.pairs())


def theirs(data, samples):
    from causallearn.search.ConstraintBased import FCI
    from causallearn.utils import cit

    class Told(cit.FisherZ):
        def __init__(self, given, **options):
            super().__init__(given, **options)
            self.sample_size = samples

    plain, cit.FisherZ = cit.FisherZ, Told
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            graph, _ = FCI.fci(data, "fisherz", ALPHA, show_progress=False)
    finally:
        cit.FisherZ = plain
    return {(i, j) for i in range(NODES) for j in range(i + 1, NODES) if graph.graph[i, j]}


def timed(work, *given):
    start = time.process_time()
    found = work(*given)
    return time.process_time() - start, found


def turn(models, data, samples):
    """CPU seconds of both over all graphs, and what they found."""
    seconds, found = np.zeros(2), []
    for (_, correlation), rows in zip(models, data, strict=True):
        one, other = timed(ours, correlation, samples), timed(theirs, rows, samples)
        seconds += [one[0], other[0]]
        found.append((one[1], other[1]))
    return seconds, found


def compared(models, found):
    """How many skeletons are equal, what share of all edges both have, and both beside the truth."""
    facts = {"equal skeletons": sum(one == other for one, other in found)}
    both, either = (sum(len(join(one, other)) for one, other in found) for join in (set.__and__, set.__or__))
    facts["edges in both, of those in either"] = both / either
    for name, each in zip(("ICD", "FCI"), zip(*found, strict=True), strict=True):
        right = sum(len(one & edges) for one, (edges, _) in zip(each, models, strict=True))
        facts[f"{name} precision"] = right / sum(map(len, each))
        facts[f"{name} recall"] = right / sum(len(edges) for edges, _ in models)
    return facts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        import causallearn  # noqa: F401
    except ImportError:
        sys.exit("bench/causes.py needs causal-learn: make bench-causes")
    rng = np.random.default_rng(SEED)
    models = [model(rng) for _ in range(options.graphs)]
    data = [data_of(correlation, rng) for _, correlation in models]
    rows, facts = [], {}
    for name, samples in SAMPLES.items():
        turn(models[:1], data[:1], samples)
        turns = [turn(models, data, samples) for _ in range(options.turns)]
        facts[f"at {name} samples"] = told = compared(models, turns[0][1])
        print(name, told, flush=True)
        of = f"{options.graphs} graphs of {NODES} nodes, {name} samples"
        rows.append(row(f"causal graphs by ICD: {of}", [seconds[0] for seconds, _ in turns], "CPU s", "—"))
        rows.append(
            row(f"the same, FCI of causal-learn 0.1.4.8: {of}", [seconds[1] for seconds, _ in turns], "CPU s", "—")
        )
        ratios = [seconds[1] / seconds[0] for seconds, _ in turns]
        rows.append(row(f"how many times less CPU time than causal-learn: {of}", ratios, "×", "≥ 5 ×"))
        equal = [100 * told["equal skeletons"] / options.graphs]
        rows.append(row(f"graphs with equal skeletons, {name} samples", equal, "%", "100 %"))
    publish("causes", rows, seed=SEED, alpha=ALPHA, degree=DEGREE, **facts)


if __name__ == "__main__":
    main()
