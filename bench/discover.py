"""Causal discovery on data: `kq.discover` against the FCI of causal-learn, with the same tests at the same level.

Random graphs with hidden causes (parentless nodes with two children or more), mean degree 2.2; the truth is the graph
of d-separation. "fisherz": 20 nodes, 3 of them hidden, linear with normal noise, 1,000 rows; "chisq": 10 nodes, 1
hidden, of two or three categories that copy a parent or are drawn, 2,000 rows; "kci": 5 nodes, nonlinear, 200 rows.
Level 0.01. CPU seconds of one thread, tests that were computed, and marks and edges beside the truth. Marks that are
right are those of edges that are found and true; the interval of a difference is a bootstrap over graphs.

    python bench/discover.py [--graphs 100]        # needs the extra fci: make bench-causes
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
import warnings

import networkx
import numpy as np
import torch
from harness import publish, row

import keyquery as kq
from keyquery.learn.discovery.independence import IndependenceTest
from keyquery.learn.discovery.pag import members
from keyquery.learn.discovery.search import search

SEED, ALPHA, DEGREE = 33, 0.01, 2.2  # graphs of seed 33 were looked at in no other run
SETS = {  # nodes, hidden, rows, our test, their test
    "Fisher's z": (20, 3, 1000, "fisher-z", "fisherz"),
    "χ²": (10, 1, 2000, "chi2", "chisq"),
    "kernel": (5, 0, 200, "kernel", "kci"),
}


def graph_of(rng, nodes, hidden):
    """A random graph and its hidden nodes."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from((i, j) for j in range(nodes) for i in range(j) if rng.random() < DEGREE / (nodes - 1))
    able = [node for node in graph if graph.in_degree(node) == 0 and graph.out_degree(node) >= 2]
    return graph, set(rng.permutation(able)[:hidden].tolist())


class DSeparation(IndependenceTest):
    """Whether nodes that are not hidden are d-separated: the truth."""

    def __init__(self, graph, hidden):
        self.graph, self.observed = graph, [node for node in graph if node not in hidden]
        super().__init__(len(self.observed), 0.5)

    def strength(self, query):
        """1 where they are connected."""
        given = {self.observed[node] for node in members(query.given)}
        return float(not networkx.is_d_separator(self.graph, self.observed[query.x], self.observed[query.y], given))


def data_of(graph, rows, test, rng):
    """Rows of a model with this graph."""
    values = np.zeros((rows, len(graph)))
    for node in graph:  # parents come first
        parents = list(graph.predecessors(node))
        if test == "chi2":
            drawn = rng.integers(0, 2 + node % 2, rows)
            chosen = rng.integers(0, len(parents) + 1, rows) if parents else np.full(rows, len(parents))
            copied = np.column_stack([*(values[:, parent] for parent in parents), drawn])[np.arange(rows), chosen]
            values[:, node] = copied % (2 + node % 2)
        elif test == "kernel":
            values[:, node] = rng.normal(size=rows) + sum(1.5 * np.sin(2 * values[:, parent]) for parent in parents)
        else:
            values[:, node] = rng.normal(size=rows) + values[:, parents] @ rng.uniform(0.4, 0.9, len(parents))
    return values


def theirs(data, test):
    """Marks by causal-learn, (at, other): mark, and the number of tests it computed."""
    from causallearn.search.ConstraintBased.FCI import fci
    from causallearn.utils import cit

    kind = {"fisherz": cit.FisherZ, "chisq": cit.Chisq_or_Gsq, "kci": cit.KCI}[test]
    computed, plain = [0], kind.__call__

    def counted(self, x, y, given=None):
        before = len(self.pvalue_cache)
        p = plain(self, x, y, given)
        computed[0] += len(self.pvalue_cache) > before
        return p

    kind.__call__ = counted
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, edges = fci(data, test, ALPHA, show_progress=False)
    finally:
        kind.__call__ = plain
    marks = {}
    for edge in edges:
        i, j = (int(node.get_name()[1:]) - 1 for node in (edge.get_node1(), edge.get_node2()))
        marks[i, j], marks[j, i] = (end.name.lower() for end in (edge.get_endpoint1(), edge.get_endpoint2()))
    return marks, computed[0]


def ours(data, test, method="icd"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reading = kq.discover(data, test, ALPHA, method, discrete=test == "chi2")
    return marks_of(reading.edges), reading.tests


def marks_of(edges):
    return {end: mark for i, j, at_i, at_j in edges for end, mark in (((i, j), at_i), ((j, i), at_j))}


def timed(work, *arguments):
    start = time.process_time()
    marks, tests = work(*arguments)
    return marks, tests, time.process_time() - start


def compared(found, truths):
    """Shares of edges and marks that are right, and of true edges that are found."""
    edges = sum(len(marks) for marks in found)
    both = [(marks, true, end) for marks, true in zip(found, truths, strict=True) for end in marks if end in true]
    right = sum(marks[end] == true[end] for marks, true, end in both)
    return {
        "edges that are true": len(both) / max(edges, 1),
        "true edges found": len(both) / sum(map(len, truths)),
        "marks of these that are right": right / max(len(both), 1),
        "marks of all true edges that are right": right / sum(map(len, truths)),
        "graphs that are right": sum(marks == true for marks, true in zip(found, truths, strict=True)),
    }


def right_marks(found, truths):
    """By graph, marks that are right and marks of edges that are found and true."""
    both = [[(end, marks[end]) for end in marks if end in true] for marks, true in zip(found, truths, strict=True)]
    return np.array(
        [[sum(true[end] == mark for end, mark in each), len(each)] for each, true in zip(both, truths, strict=True)]
    )


def difference(first, second):
    """Difference of the shares of right marks in percent, and its 95 % interval over resampled graphs."""
    drawn = np.random.default_rng(0).integers(len(first), size=(2000, len(first)))
    shares = [part.sum(0)[0] / part.sum(0)[1] for part in (first, second)]
    resampled = [part[drawn].sum(1) for part in (first, second)]
    each = 100 * (resampled[0][:, 0] / resampled[0][:, 1] - resampled[1][:, 0] / resampled[1][:, 1])
    low, high = np.percentile(each, [2.5, 97.5])
    return {"value": float(100 * (shares[0] - shares[1])), "low": float(low), "high": float(high)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, facts = [], {}
    for name, (nodes, hidden, size, test, their_test) in SETS.items():
        rng, truths, results = np.random.default_rng(SEED), [], {"ICD": [], "FCI": [], "causal-learn": []}
        timed(ours, rng.integers(0, 2, (50, 3)).astype(float) + rng.normal(size=(50, 3)) * (test != "chi2"), test)
        for _ in range(options.graphs):
            graph, gone = graph_of(rng, nodes, hidden)
            data = data_of(graph, size, test, rng)[:, [node for node in graph if node not in gone]]
            truths.append(marks_of(search(DSeparation(graph, gone)).graph.edges()))
            results["ICD"].append(timed(ours, data, test))
            results["FCI"].append(timed(ours, data, test, "fci"))
            results["causal-learn"].append(timed(theirs, data, their_test))
        for by, each in results.items():
            found, tests, seconds = zip(*each, strict=True)
            facts[f"{by}, {name}"] = {"tests": sum(tests), "CPU s": sum(seconds), **compared(found, truths)}
            print(by, name, facts[f"{by}, {name}"], flush=True)
        ratios = [b[2] / a[2] for a, b in zip(results["ICD"], results["causal-learn"], strict=True)]
        fewer = [b[1] / a[1] for a, b in zip(results["ICD"], results["causal-learn"], strict=True)]
        of = f"kq.discover by ICD, {name}, {options.graphs} graphs of {nodes} nodes, {hidden} hidden, {size:,} rows"
        rows.append(row(f"how many times less CPU time than causal-learn's FCI: {of}", ratios, "×", "≥ 5 ×"))
        rows.append(row(f"how many times fewer tests: {of}", fewer, "×", "> 1 ×"))
        marks = [right_marks([one[0] for one in results[by]], truths) for by in ("ICD", "causal-learn")]
        more = {"what": f"marks that are right less causal-learn's: {of}", "unit": "points", "goal": "≥ 0"}
        rows.append(more | difference(*marks))
        print(rows[-1], flush=True)
    publish("discover", rows, seed=SEED, alpha=ALPHA, degree=DEGREE, **facts)


if __name__ == "__main__":
    main()
