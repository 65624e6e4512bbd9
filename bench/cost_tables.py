"""Tables of `bench/cost.py`: how estimates agree with measurements, and where they do not.

    python bench/cost_tables.py docs/studies/cost.json [--page docs/studies/cost.md]

A predictor is compared with the measurement on A. An estimate is inside if it lies within two standard errors of the
measurement, or a tenth of it. A cell is significant if its cost is more than two standard errors from zero, and needed
if it is above .001 nats per token by as much.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

SAMPLES = (1, 2, 4, 8)
NEEDED = 0.001  # nats per token
FREE = 0.003  # cost up to which a change is free
BINS = (-np.inf, 0.001, 0.01, 0.1, np.inf)  # of estimates
START, END = "<!-- python bench/cost_tables.py --page -->", "<!-- end -->"
Row = list[str]


class Cells:
    """The cells of one block of a model, with what was measured of them."""

    def __init__(self, block: dict[str, Any]) -> None:
        self.block = block
        self.parts = np.array(block["cells"]["part"])
        heads = zip(block["cells"]["layer"], block["cells"]["head"], strict=True)
        numbers: dict[Any, int] = {}
        self.heads = np.array([numbers.setdefault(head, len(numbers)) for head in heads])
        self.truth, self.error = (np.array(block["measured_A"][name]) for name in ("change", "error"))
        self.limit = 2 * self.error + 0.1 * np.abs(self.truth)

    def estimate(self, samples: int | str = 4, terms: dict[str, list[float]] | None = None) -> np.ndarray:
        """First term and second, of `samples` draws of labels, or of the true labels."""
        terms = self.block["A"] if terms is None else terms
        second = terms["true"] if samples == "true" else terms[f"second_{samples}"]
        return np.array(terms["first"]) + np.array(second)


def predictors(cells: Cells) -> dict[str, np.ndarray]:
    """What predicts the measurement on A, by name."""
    block = cells.block
    distances = {
        "share of the variance": block["share"],
        "divergence of the attention": block["divergence"],
        "change of the output": block["moved"],
    }
    return {name: np.array(values) for name, values in distances.items() if values is not None} | {
        "first term": np.array(block["A"]["first"]),
        "first + true labels": cells.estimate("true"),
        "**estimate**, same windows": cells.estimate(),
        "**estimate**, other windows": cells.estimate(terms=block["B"]),
        "measured, other windows": np.array(block["measured_B"]["change"]),
    }


def rank(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation."""
    return float(spearmanr(x, y)[0]) if len(x) > 2 else np.nan


def above(x: np.ndarray, positive: np.ndarray) -> float:
    """The probability that a positive has the larger value (AUC)."""
    if positive.all() or not positive.any():
        return np.nan
    pairs = x[positive][:, None] - x[~positive][None]
    return float((pairs > 0).mean() + (pairs == 0).mean() / 2)


def scores(x: np.ndarray, truth: np.ndarray, error: np.ndarray, heads: np.ndarray) -> dict[str, float]:
    """How well a predictor matches the measurement."""
    sure, needed = np.abs(truth) > 2 * error, truth - 2 * error > NEEDED
    costly = [np.flatnonzero(heads == head) for head in np.unique(heads[needed])]
    named = [x[cells].argmax() == truth[cells].argmax() for cells in costly]
    return {
        "all": rank(x, truth),
        "significant": rank(x[sure], truth[sure]),
        "needed": above(x, needed),
        "costliest": float(np.mean(named)) if named else np.nan,
        "inside": float((np.abs(x - truth) <= 2 * error + 0.1 * np.abs(truth)).mean()),
    }


def with_intervals(cells: Cells, draws: int = 400) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Every predictor's scores, each with its 95 % interval over heads (bootstrap)."""
    source, kinds = np.random.default_rng(0), predictors(cells)
    of_head = [np.flatnonzero(cells.heads == head) for head in np.unique(cells.heads)]
    samples = []
    for _ in range(draws):
        drawn = source.integers(len(of_head), size=len(of_head))
        numbers = np.concatenate([of_head[head] for head in drawn])
        samples.append((numbers, np.repeat(np.arange(len(drawn)), [len(of_head[head]) for head in drawn])))
    table = {}
    for name, x in kinds.items():
        again = [scores(x[own], cells.truth[own], cells.error[own], heads) for own, heads in samples]
        whole = scores(x, cells.truth, cells.error, cells.heads)
        ends = {key: np.nanpercentile([score[key] for score in again], [2.5, 97.5]) for key in whole}
        table[name] = {key: (value, *map(float, ends[key])) for key, value in whole.items()}
    return table


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def agreement(models: dict[str, Any]) -> Iterator[str]:
    """The main table of every model and text."""
    for name, model in models.items():
        cells = Cells(model)
        sure = int((np.abs(cells.truth) > 2 * cells.error).sum())
        facts = f"{len(cells.truth)} cells, {sure} of them significant; {model['objective']}, {model['device']}"
        yield from ("", f"**{name}**: {facts}", "")
        head = ["predictor", "rank, all", "rank, significant", "AUC needed", "names the costliest part", "inside"]
        rows = []
        for predictor, columns in with_intervals(cells).items():
            values = [f"{value:.2f} [{low:.2f}, {high:.2f}]" for value, low, high in columns.values()]
            distance = "estimate" not in predictor and "first" not in predictor and "measured" not in predictor
            rows.append([predictor, *values[:-1], "–" if distance else values[-1]])  # not in nats
        yield from markdown(head, rows)


def per_model(models: dict[str, Any], head: Sequence[str], row_of: Callable[[Cells], Sequence[Row]]) -> Iterator[str]:
    """A table with one row or more per model and text."""
    yield from markdown(
        ["model and text", *head], [[name, *row] for name, m in models.items() for row in row_of(Cells(m))]
    )


def curves(models: dict[str, Any]) -> Iterator[str]:
    """Fewer samples of labels, and fewer windows, against the measurement on 64 windows."""

    def row_of(cells: Cells) -> list[Row]:
        if "fewer" not in cells.block:
            return []
        fewer = cells.block["fewer"]
        estimates = [cells.estimate(count) for count in SAMPLES]
        estimates += [cells.estimate(terms=terms) for terms in fewer.values()]
        sure = np.abs(cells.truth) > 2 * cells.error
        return [
            [
                f"{rank(x[sure], cells.truth[sure]):.2f} / {(np.abs(x - cells.truth) <= cells.limit).mean():.2f}"
                for x in estimates
            ]
        ]

    counts = next(iter(models.values()))["fewer"]
    yield from per_model(models, [*(f"K = {k}" for k in SAMPLES), *(f"{n} windows" for n in counts)], row_of)


def calibration(models: dict[str, Any]) -> Iterator[str]:
    """Mean estimate → mean cost, and how many, by size of the estimate."""

    def row_of(cells: Cells) -> list[Row]:
        x, row = cells.estimate(), []
        for low, high in pairwise(BINS):
            some = (x > low) & (x <= high)
            row.append(f"{x[some].mean():.4f} → {cells.truth[some].mean():.4f} ({some.sum()})" if some.any() else "–")
        return [row]

    yield from per_model(models, ["up to .001", ".001 to .01", ".01 to .1", "above .1"], row_of)


def foreseen(models: dict[str, Any]) -> Iterator[str]:
    """Do cheap figures foresee that an estimate is outside? AUC, each against all cells that are inside."""

    def row_of(cells: Cells) -> list[Row]:
        block, x = cells.block, cells.estimate()
        if block["divergence"] is None:
            return []
        outside = np.abs(x - cells.truth) > cells.limit
        first, second = np.array(block["A"]["first"]), np.array(block["A"]["second_4"])
        figures = [
            np.abs(x),
            second / np.maximum(np.abs(first), 1e-9),
            np.array(block["moved"]),
            np.array(block["divergence"]),
            -np.array(block["A"]["effective"]),
            np.abs(np.array(block["A"]["true"]) - second),
        ]
        return [[f"{outside.sum()} of {len(x)}", *(f"{above(figure, outside):.2f}" for figure in figures)]]

    head = ["outside", "size", "second / first", "output", "divergence", "few windows", "true against sampled labels"]
    yield from per_model(models, head, row_of)


def repaired(models: dict[str, Any]) -> Iterator[str]:
    """Costly cells: the estimate, twice the change of the loss at half the change, and the slope there."""

    def row_of(cells: Cells) -> list[Row]:
        if "half" not in cells.block:
            return []
        half = cells.block["half"]
        own = np.array(half["cell"], dtype=int)
        if not len(own):
            return [["0", "–", "–", "–", "–"]]
        truth, limit, x = cells.truth[own], cells.limit[own], cells.estimate()[own]
        # half the change costs half of the first term and a quarter of the second: what differs is of higher order
        expected = np.array(cells.block["A"]["first"])[own] / 2 + np.array(cells.block["A"]["second_4"])[own] / 4
        disagreement = np.abs(np.array(half["change"]) - expected) / np.maximum(np.abs(expected), 1e-9)
        outside = np.abs(x - truth) > limit
        errors = [np.median(np.abs(guess - truth) / np.abs(truth)) for guess in (x, np.array(half["slope"]))]
        inside = [float((np.abs(guess - truth) <= limit).mean()) for guess in (x, np.array(half["slope"]))]
        columns = [f"{error:.0%} / {share:.2f}" for error, share in zip(errors, inside, strict=True)]
        worst = int(np.abs(x - truth).argmax())
        example = f"{truth[worst]:.2f}: {x[worst]:.2f}, {half['slope'][worst]:.2f}"
        return [[str(len(own)), *columns, f"{above(disagreement, outside):.2f}", example]]

    head = ["costly cells", "estimate", "slope at half", "AUC of disagreement at half", "worst: estimate, slope"]
    yield from per_model(models, head, row_of)


def joint(models: dict[str, Any]) -> Iterator[str]:
    """Changes of whole layers, and of all heads at once."""

    def row_of(cells: Cells) -> list[Row]:
        if "layer" not in cells.block:
            return []
        layers, everything = Cells(cells.block["layer"]), Cells(cells.block["all"])
        inside = (np.abs(layers.estimate() - layers.truth) <= layers.limit).mean()
        row = [f"{rank(layers.estimate(), layers.truth):.2f} / {inside:.2f} ({len(layers.truth)})"]
        for part in ("position", "symmetric", "zero", "keys 4", "keys 3", "keys 4 mean apart", "keys 3 mean apart"):
            number = np.flatnonzero(everything.parts == part)
            values = [f"{everything.estimate()[i]:.3g} → {everything.truth[i]:.3g}" for i in number]
            row.append(values[0] if values else "–")
        return [row]

    kinds = ["position out", "symmetric out", "off", "keys 4", "keys 3", "keys 4, mean apart", "keys 3, mean apart"]
    yield from per_model(models, ["by layer: rank / inside", *(f"all: {kind}" for kind in kinds)], row_of)


def further(models: dict[str, Any]) -> Iterator[str]:
    """Other changes by head: rank correlation, share inside, and in how many heads they are free."""
    names = list(
        dict.fromkeys(part for m in models.values() for part in m.get("more", {"cells": {"part": []}})["cells"]["part"])
    )

    def row_of(cells: Cells) -> list[Row]:
        if "more" not in cells.block:
            return []
        more, row = Cells(cells.block["more"]), []
        for name in names:
            some = more.parts == name
            if not some.any():
                row.append("–")
                continue
            x, truth = more.estimate()[some], more.truth[some]
            free = (truth + 2 * more.error[some] <= FREE).mean()
            inside = (np.abs(x - truth) <= more.limit[some]).mean()
            row.append(f"{free:.0%} ({rank(x, truth):.2f} / {inside:.2f})")
        return [row]

    yield from per_model(models, names, row_of)


def pages(models: dict[str, Any]) -> Iterator[str]:
    """All tables, each below its title."""
    titled = (
        ("Estimates against measurements", agreement),
        ("Samples of labels, and windows: rank on significant cells / inside", curves),
        ("Calibration: mean estimate → mean measured cost (cells), by size of the estimate", calibration),
        ("Can an estimate that is outside be foreseen? AUC of cheap figures", foreseen),
        ("Does a second step repair it? Median error / inside, over costly cells", repaired),
        ("Changes made together: estimate → measured, nats per token", joint),
        ("Other changes: free in so many heads (rank / inside)", further),
    )
    for title, table in titled:
        yield from ("", f"## {title}", "", *table(models))


def main() -> None:
    """Print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what bench/cost.py wrote")
    parser.add_argument("--page", type=Path, help="a page whose block of tables is written anew")
    asked = parser.parse_args()
    lines = list(pages(json.loads(asked.results.read_text())))
    if asked.page is None:
        print("\n".join(lines))
        return
    before, rest = asked.page.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    asked.page.write_text("\n".join([before + START, *lines, "", END]) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
