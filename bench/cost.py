"""Are estimated costs right? Parts of every head left out, and other changes: estimated, and measured.

For each model and text, windows are taken for the means by position, then 64 (A), then 64 others (B). On A and on B the
cost of every cell, a part of a head left out, is estimated and measured. Beside it, on A: cheap predictors (share of
the variance, change of the output, divergence of the attention), the estimate from fewer windows and samples, costly
cells at half the change, changes of whole layers and of all heads, and other changes.

    python bench/cost.py MODEL --text near.txt --text far.txt --device cuda --out docs/studies/cost.json
    python bench/cost_tables.py docs/studies/cost.json --page docs/studies/cost.md
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.changes import Cell, Change, HeadCall, Trial
from keyquery.instruments.ablation.estimate import Estimates, estimate
from keyquery.instruments.ablation.losses import Objective, default_loss
from keyquery.instruments.ablation.measure import Measurement
from keyquery.instruments.ablation.named import Made, names_of
from keyquery.intervene.dial.means import Means
from keyquery.intervene.rewrites import sites_of
from keyquery.listening.hooks import running
from keyquery.listening.inputs.batches import read_lines, text_batches
from keyquery.listening.inputs.load import load_model
from keyquery.reading import provenance, short
from keyquery.support.devices import pick_device

SAMPLES = (1, 2, 4, 8)
MORE = ("zero", "only position", "form symmetric", "form psd", "form skew", "form split", "form rank 8")
JOINT = (*PARTS, "zero", "keys 4", "keys 3", "keys 4 mean apart", "keys 3 mean apart")
COSTLY = 0.02  # nats per token: cells that are also measured at half the change
STEP = 0.05  # of the difference that gives the slope at half the change
ROWS = 16  # windows of a batch


def windows_of(tokenizer: Any, text: str, length: int, count: int) -> Tensor:
    """Full windows of a text, or of token ids (.ids, a sequence per line)."""
    if text.endswith(".ids"):
        sequences = [list(map(int, line.split()))[:length] for line in Path(text).read_text().splitlines()]
        rows = [torch.tensor(ids)[None] for ids in sequences if len(ids) == length]
    else:
        rows = [
            ids[None]
            for batch in text_batches(read_lines(text), tokenizer, length, (count + ROWS) * length * 2)
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
            if int(mask.sum()) == length
        ]
    if len(rows) < count and not text.endswith(".ids"):  # short lines: the text as one stream
        ids = torch.tensor(tokenizer.encode(Path(text).read_text()))
        rows = list(ids[: len(ids) // length * length].reshape(-1, 1, length))
    if len(rows) < count:
        raise ValueError(f"{text} has {len(rows)} windows of {length} tokens, and {count} are needed")
    return torch.cat(rows[:count])


def batches_of(windows: Tensor) -> list[dict[str, Tensor]]:
    """Windows as batches for a model."""
    return [{"input_ids": ids} for ids in windows.split(ROWS)]


def scaled(change: Change, factor: float) -> Change:
    """A change made in part: the output moves by `factor` of the way."""
    return replace(change, output=lambda heads: heads.output + factor * (change.output(heads) - heads.output))


class Cells:
    """Changes of heads of a model, estimated and measured."""

    def __init__(self, model: Any, loss: Objective, about: list[Any], names: Sequence[str], means: Means) -> None:
        self.model, self.loss, self.sites, self.means = model, loss, sites_of(model), means
        self.by_site = {index: means.of(site) for index, site in self.sites.items()}
        self.whole = {index: list(range(site.count)) for index, site in self.sites.items()}
        made = Made(model, about, self.sites, self.whole, lambda: means)
        self.changes = [made.change(name) for name in names_of(list(names), placed=True)]

    def trials(self, by: str) -> list[Trial]:
        """Each change of each "head" (key head, if it changes keys), of each "layer", or of "all" heads."""
        rows: list[Trial] = []
        for change in self.changes:
            if by == "all":
                rows.append(Trial(change, self.whole, {"layer": None, "head": None, "part": change.name}))
                continue
            for index, site in self.sites.items():
                shared = site.count // site.key_heads if change.per_key_head else 1
                size = site.count if by == "layer" else shared
                for number, start in enumerate(range(0, site.count, size)):
                    names = {"layer": index, "head": None if by == "layer" else number, "part": change.name}
                    rows.append(Trial(change, {index: list(range(start, start + size))}, names))
        return rows

    def estimates(self, batches: list[Any], samples: int) -> Estimates:
        """Both terms of every change of every head."""
        trials = [Trial(change, self.whole) for change in self.changes]
        return estimate(self.model, batches, self.loss, trials, self.sites, self.by_site, samples)

    def measured(self, batches: list[Any], trials: Sequence[Trial]) -> dict[str, list[float]]:
        """The change of the loss by trial, and its standard error over windows."""
        runs = Measurement(self.model, batches, self.loss, self.sites, self.by_site)
        changes = [after - runs.before for after in runs.losses(trials)]
        return {
            "change": [float(change.mean()) for change in changes],
            "error": [float(change.std() / len(change) ** 0.5) for change in changes],
        }

    def distances(self, batches: list[Any]) -> dict[str, dict[tuple[Cell, str], float]]:
        """The relative change of each head's output, and the divergence of its attention, without each part."""
        sums: dict[str, dict[tuple[Cell, str], list[float]]] = {"moved": {}, "divergence": {}}
        by_module = {site.module: site for site in self.sites.values()}

        def add(call: Any) -> None:
            site = by_module.get(call.module)
            if site is None:
                return
            view = HeadCall(call, site, range(site.count), self.by_site[site.index])
            weights = HeadCall(call, site, range(site.count), self.by_site[site.index])
            weights.__dict__["values"] = torch.eye(
                call.key.shape[-2], device=call.key.device
            )  # the output: the weights
            size = view.output.square().sum((0, 2, 3))
            for change in self.changes:
                moved = ((change.output(view) - view.output).square().sum((0, 2, 3)) / size).sqrt()
                new = change.output(weights).clamp(min=1e-30).log()
                log = weights.weights.clamp(min=1e-30).log()
                divergence = (weights.weights * (log - new)).sum(-1).mean((0, 2))
                for head in range(site.count):
                    key = ((site.index, head), change.name)
                    sums["moved"].setdefault(key, []).append(float(moved[head]))
                    sums["divergence"].setdefault(key, []).append(float(divergence[head]))

        with running(self.model) as run, kq.listen(self.model, add):
            for batch in batches:
                run(batch)
        return {name: {key: sum(values) / len(values) for key, values in found.items()} for name, found in sums.items()}


def terms(estimates: Estimates, trials: Sequence[Trial], windows: int | None = None) -> dict[str, list[float]]:
    """The first term by trial, the second for several numbers of samples and for the true labels, over some windows.

    `effective`: how many windows the estimate with 4 samples rests on.
    """
    columns: dict[str, list[float]] = {}
    counts = estimates.counts[:windows]
    for trial in trials:
        sums = torch.stack([estimates.terms[trial.change.name, cell] for cell in trial.cells]).sum(0)[:, :windows]
        first, products = sums[0], sums[1:]
        row = {"first": first / counts, "true": first.square() / 2 / counts}
        row |= {f"second_{k}": products[:k].square().mean(0) / 2 / counts for k in SAMPLES if k <= len(products)}
        sizes = (row["first"] + row.get("second_4", row["second_1"])).abs()
        for name, values in row.items():
            columns.setdefault(name, []).append(float(values.mean()))
        columns.setdefault("effective", []).append(float(sizes.sum().square() / sizes.square().sum().clamp(min=1e-300)))
    return columns


def measure(source: str, text: str, asked: argparse.Namespace) -> dict[str, Any]:
    """All columns of a model on a text."""
    model, tokenizer = load_model(source, lm_head=True, device=asked.device)
    loss = default_loss(model, tokenizer)
    windows = windows_of(tokenizer, text, asked.length, asked.means + 2 * asked.windows)
    about, first, second = map(batches_of, windows.split([asked.means, asked.windows, asked.windows]))
    means = Means(model, about, "position")
    seconds: dict[str, float] = {}

    def stage(name: str, function: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        seconds[name] = time.perf_counter() - start
        print(f"{Path(source).name}, {Path(text).name}: {name} {seconds[name]:.1f} s", flush=True)
        return result

    parts = Cells(model, loss, about, PARTS, means)
    trials = parts.trials("head")
    names = [trial.names for trial in trials]
    out: dict[str, Any] = {"cells": _columns(names)}
    on_first = stage("estimates A", parts.estimates, first, max(SAMPLES))
    out["A"] = terms(on_first, trials)
    out["B"] = terms(stage("estimates B", parts.estimates, second, max(SAMPLES)), trials)
    fewer = [count for count in (8, 16, 32) if count < asked.windows]
    out["fewer"] = {str(count): terms(on_first, trials, count) for count in fewer}
    out["measured_A"] = stage("measured A", parts.measured, first, trials)
    out["measured_B"] = stage("measured B", parts.measured, second, trials)
    cells = [((name["layer"], name["head"]), name["part"]) for name in names]
    out |= {name: [values[c] for c in cells] for name, values in stage("distances", parts.distances, first).items()}
    out["share"] = shares(model, about, cells)
    out["half"] = stage("half of the change", halves, parts, first, trials, out)
    for by in ("layer", "all"):
        changes = Cells(model, loss, about, PARTS if by == "layer" else JOINT, means)
        out[by] = stage(f"{by}, together", both, changes, first, by)
    if asked.more:
        out["more"] = stage("other changes", both, Cells(model, loss, about, asked.more, means), first, "head")
    device = next(model.parameters()).device
    facts = {"objective": loss.name, "windows": asked.windows, "length": asked.length, "means": asked.means}
    facts |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", "tf32": asked.tf32}
    return {**facts, "seconds": short(seconds, 3), **provenance(text=Path(text).name), **short(out, 5)}


def both(cells: Cells, batches: list[Any], by: str) -> dict[str, Any]:
    """Estimates and measurements of changes that are made together."""
    trials = cells.trials(by)
    estimates = terms(cells.estimates(batches, 4), trials)
    return {
        "cells": _columns([trial.names for trial in trials]),
        "A": estimates,
        "measured_A": cells.measured(batches, trials),
    }


def halves(cells: Cells, batches: list[Any], trials: Sequence[Trial], out: Mapping[str, Any]) -> dict[str, Any]:
    """Costly cells, by estimate or measurement: the loss at half the change, and its slope there."""
    sizes = zip(out["A"]["first"], out["A"]["second_4"], out["measured_A"]["change"], strict=True)
    numbers = [number for number, (a, b, change) in enumerate(sizes) if max(abs(a + b), abs(change)) > COSTLY]
    factors = (0.5 - STEP, 0.5, 0.5 + STEP)
    part = [
        Trial(scaled(trials[number].change, factor), trials[number].heads) for number in numbers for factor in factors
    ]
    changes = cells.measured(batches, part)["change"]
    below, half, above = (changes[place :: len(factors)] for place in range(len(factors)))
    slopes = [(high - low) / (2 * STEP) for low, high in zip(below, above, strict=True)]
    return {"cell": numbers, "change": half, "slope": slopes}


def shares(model: Any, about: list[Any], cells: Sequence[tuple[Cell, str]]) -> list[float]:
    """The share of each part in the variance of its head's scores."""
    look = kq.look(model, inputs=about, cost=False)
    by_head = {(head["layer"], head["head"]): head["on_data"] for head in look.heads}
    return [by_head[cell][part] for cell, part in cells]


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def main() -> None:
    """Measure a model on texts; what the file holds of others is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a .gguf file")
    parser.add_argument("--text", action="append", required=True, help="a text file; may be given several times")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--name", help="of the model, default: that of its file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tf32", action="store_true", help="products in TF32 on a GPU")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--windows", type=int, default=64, help="in each of A and B")
    parser.add_argument("--means", type=int, default=256, help="windows for the means by position")
    parser.add_argument("--more", nargs="*", default=MORE, help="further changes by head")
    asked = parser.parse_args()
    asked.device = str(pick_device(asked.device))
    torch.backends.cuda.matmul.allow_tf32 = asked.tf32
    for text in asked.text:
        measured = measure(asked.model, text, asked)
        models = json.loads(asked.out.read_text()) if asked.out.exists() else {}
        models[f"{asked.name or Path(asked.model).stem} on {Path(text).stem}"] = measured
        asked.out.write_text(json.dumps(models, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
