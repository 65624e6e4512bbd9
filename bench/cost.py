"""Are estimated costs right? Every part of every head left out: estimated, and measured, on two sets of windows.

For each model and text, windows are taken for the means by position, then 64 (A), then 64 others (B). On A and on B the
cost of every cell is estimated and measured. A predictor is compared with the measurement on A:

    same      the estimate on A, which shares its sampling noise
    other     the estimate on B
    ceiling   the measurement on B: what a second measurement of this size reaches

beside the share of the score variance, the change of the head's output, the first term alone, and the first term with
the Fisher form of the true labels. Further changes are estimated and measured on A.

    python bench/cost.py measure MODEL --text near.txt --text far.txt --device cuda --out cost.json
    python bench/cost.py tables --out cost.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.changes import HeadCall
from keyquery.instruments.ablation.estimate import estimate
from keyquery.instruments.ablation.losses import Objective, default_loss
from keyquery.instruments.ablation.measure import Measurement, Trial
from keyquery.instruments.ablation.named import Made, names_of
from keyquery.intervene.dial.means import Means
from keyquery.intervene.rewrites import sites_of
from keyquery.listening.hooks import running
from keyquery.listening.inputs.batches import read_lines, text_batches
from keyquery.listening.inputs.load import load_model
from keyquery.reading import provenance, short
from keyquery.support.devices import pick_device

SAMPLES = (1, 2, 4, 8)
WINDOWS = 64
MORE = ("zero", "only position", "form symmetric", "form psd", "form skew", "form split", "keys 4", "keys 3")
NEEDED = 0.001  # nats per token: a cell is needed if its cost is above, by two standard errors


def windows_of(model: Any, tokenizer: Any, text: str, length: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Full windows of a text, or of token ids (.ids, a sequence per line), as batches of 16."""
    if text.endswith(".ids"):
        sequences = [list(map(int, line.split()))[:length] for line in Path(text).read_text().splitlines()]
        kept = torch.tensor([ids for ids in sequences if len(ids) == length][:count])
        if len(kept) < count:
            raise ValueError(f"{text} has {len(kept)} sequences of {length} tokens, and {count} are needed")
        return [{"input_ids": batch} for batch in kept.split(16)]
    tokens = (count + 16) * length * 2
    rows = [
        ids[None]
        for batch in text_batches(read_lines(text), tokenizer, length, tokens)
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        if int(mask.sum()) == length
    ]
    if len(rows) < count:  # short lines: the text as one stream
        ids = torch.tensor(tokenizer.encode(Path(text).read_text()))
        rows = list(ids[: len(ids) // length * length].reshape(-1, 1, length))
    if len(rows) < count:
        raise ValueError(f"{text} has {len(rows)} windows of {length} tokens, and {count} are needed")
    return [{"input_ids": batch} for batch in torch.cat(rows[:count]).split(16)]


class Cells:
    """Every change of every head of a model, estimated and measured."""

    def __init__(self, model: Any, loss: Objective, about: list[Any], changes: tuple[str, ...]) -> None:
        self.model, self.loss, self.sites = model, loss, sites_of(model)
        self.means = Means(model, about, "position")
        chosen = {index: list(range(site.count)) for index, site in self.sites.items()}
        made = Made(model, about, self.sites, chosen, lambda: self.means)
        self.changes = [made.change(name) for name in names_of(list(changes), placed=True)[0]]
        self.trials = [
            (change.name, index, number, Trial(change, {index: heads}))
            for change in self.changes
            for index, site in self.sites.items()
            for number, heads in enumerate(self._units(site, change))
        ]

    @staticmethod
    def _units(site: Any, change: Any) -> list[list[int]]:
        shared = site.count // site.key_heads if change.per_key_head else 1
        return [list(range(head, head + shared)) for head in range(0, site.count, shared)]

    def estimated(self, batches: list[Any]) -> list[dict[str, Any]]:
        """Both terms per cell, for several numbers of samples, and that of the true labels."""
        cells = {c.name: {i: list(range(site.count)) for i, site in self.sites.items()} for c in self.changes}
        found = estimate(self.model, batches, self.loss, self.changes, cells, self.sites, self.means, max(SAMPLES))
        rows = []
        for name, index, _, trial in self.trials:
            own = [(index, head) for head in trial.heads[index]]
            first = torch.stack([found.first[name, cell] for cell in own]).sum(0)
            products = torch.stack([found.products[name, cell] for cell in own]).sum(0)
            second = {f"second_{k}": float((products[:k].square().mean(0) / 2 / found.counts).mean()) for k in SAMPLES}
            true = float((first.square() / 2 / found.counts).mean())
            rows.append({"first": float((first / found.counts).mean()), **second, "second_true": true})
        return rows

    def measured(self, batches: list[Any]) -> list[dict[str, float]]:
        """The change of the loss, and its standard error over windows."""
        runs = Measurement(self.model, batches, self.loss, self.sites, self.means)
        changes = [after - runs.before for after in runs.losses([trial for *_, trial in self.trials])]
        return [{"change": float(d.mean()), "error": float(d.std() / len(d) ** 0.5)} for d in changes]

    def moved(self, batches: list[Any]) -> dict[tuple[int, int, str], float]:
        """The relative change of the head's output, by layer, head and part."""
        sums: dict[tuple[int, int, str], list[float]] = {}
        by_module = {site.module: site for site in self.sites.values()}

        def add(call: Any) -> None:
            site = by_module.get(call.module)
            if site is None:
                return
            view = HeadCall(call, site, range(site.count), self.means.of(site))
            size = view.output.square().sum((0, 2, 3))
            for change in self.changes:
                if change.name in PARTS:
                    ratio = ((change(view) - view.output).square().sum((0, 2, 3)) / size).sqrt()
                    for head, value in enumerate(ratio.tolist()):
                        sums.setdefault((site.index, head, change.name), []).append(value)

        with running(self.model) as run, kq.listen(self.model, add):
            for batch in batches:
                run(batch)
        return {key: sum(values) / len(values) for key, values in sums.items()}


def measure(source: str, text: str, asked: argparse.Namespace) -> dict[str, Any]:
    """All rows of a model on a text."""
    start = time.perf_counter()
    model, tokenizer = load_model(source, lm_head=True, device=asked.device)
    _, loss = default_loss(model, tokenizer)
    every = windows_of(model, tokenizer, text, asked.length, asked.means + 2 * asked.windows)
    cut = [asked.means // 16, (asked.means + asked.windows) // 16]
    about, first, second = every[: cut[0]], every[cut[0] : cut[1]], every[cut[1] :]
    parts = Cells(model, loss, about, PARTS)
    timed: dict[str, float] = {}

    def stage(name: str, function: Any, *args: Any) -> Any:
        began = time.perf_counter()
        out = function(*args)
        timed[name] = time.perf_counter() - began
        print(f"{Path(source).name}, {Path(text).name}: {name} {timed[name]:.1f} s", flush=True)
        return out

    columns = {
        "A": stage("estimates A", parts.estimated, first),
        "B": stage("estimates B", parts.estimated, second),
        "measured_A": stage("measured A", parts.measured, first),
        "measured_B": stage("measured B", parts.measured, second),
    }
    moved = stage("outputs", parts.moved, first)
    look = kq.look(model, inputs=about, cost=False)
    shares = {(head["layer"], head["head"]): head["on_data"] for head in look.heads if head["on_data"]}
    rows = []
    for number, (name, index, head, _) in enumerate(parts.trials):
        row: dict[str, Any] = {"layer": index, "head": head, "part": name, "share": shares[index, head][name]}
        row["moved"] = moved[index, head, name]
        rows.append(row | {column: own[number] for column, own in columns.items()})
    more = []
    if asked.more:
        further = Cells(model, loss, about, tuple(asked.more))
        pairs = stage("estimates, more", further.estimated, first), stage("measured, more", further.measured, first)
        for (name, index, head, _), A, measured_A in zip(further.trials, *pairs, strict=True):
            more.append({"layer": index, "head": head, "part": name, "A": A, "measured_A": measured_A})
    facts = {"objective": loss.name, "windows": asked.windows, "length": asked.length, "means": asked.means}
    facts |= {"seconds": timed | {"all": time.perf_counter() - start}, "device": _device_name(model)}
    return {**facts, **provenance(text=Path(text).name), "rows": short(rows, 5), "more": short(more, 5)}


def _device_name(model: Any) -> str:
    device = next(model.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def predictors(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """What predicts the measurement on A, by name."""

    def column(*keys: str) -> np.ndarray:
        values: Any = rows
        for key in keys:
            values = [row[key] for row in values]
        return np.array(values)

    kinds = {
        "share of variance": column("share"),
        "change of output": column("moved"),
        "first term": column("A", "first"),
    }
    kinds["first + true labels"] = column("A", "first") + column("A", "second_true")
    kinds |= {f"estimate, K = {k}": column("A", "first") + column("A", f"second_{k}") for k in SAMPLES}
    kinds["estimate on other windows"] = column("B", "first") + column("B", "second_4")
    kinds["measured on other windows"] = column("measured_B", "change")
    return kinds


def scored(rows: list[dict[str, Any]], x: np.ndarray) -> dict[str, float]:
    """How well a predictor matches the measurement on A."""
    truth = np.array([row["measured_A"]["change"] for row in rows])
    error = np.array([row["measured_A"]["error"] for row in rows])
    surely, needed = np.abs(truth) > 2 * error, truth - 2 * error > NEEDED
    heads: dict[tuple[int, int], list[int]] = {}
    for number, row in enumerate(rows):
        heads.setdefault((row["layer"], row["head"]), []).append(number)
    costly = [own for own in heads.values() if needed[own].any()]
    named = [own[int(x[own].argmax())] == own[int(truth[own].argmax())] for own in costly]
    above = (x[needed][:, None] > x[~needed][None]).mean() + (x[needed][:, None] == x[~needed][None]).mean() / 2
    return {
        "all": float(spearmanr(x, truth)[0]),
        "significant": float(spearmanr(x[surely], truth[surely])[0]),
        "needed": float(above) if needed.any() and not needed.all() else float("nan"),
        "costliest": float(np.mean(named)) if named else float("nan"),
        "inside": float((np.abs(x - truth) <= 2 * error + 0.1 * np.abs(truth)).mean()),
    }


def table(rows: list[dict[str, Any]], draws: int = 200) -> dict[str, dict[str, list[float]]]:
    """Every predictor's scores, each with its 95 % interval over heads (bootstrap)."""
    source, kinds = np.random.default_rng(0), predictors(rows)
    heads = sorted({(row["layer"], row["head"]) for row in rows})
    own = {head: [i for i, row in enumerate(rows) if (row["layer"], row["head"]) == head] for head in heads}
    samples = [
        np.concatenate([own[heads[i]] for i in source.integers(len(heads), size=len(heads))]) for _ in range(draws)
    ]
    out = {}
    for name, x in kinds.items():
        drawn = [
            scored([{**rows[i], "layer": at} for at, i in enumerate_heads(pick, len(PARTS))], x[pick])
            for pick in samples
        ]
        ends = {key: np.nanpercentile([score[key] for score in drawn], [2.5, 97.5]).tolist() for key in drawn[0]}
        out[name] = {key: [value, *ends[key]] for key, value in scored(rows, x).items()}
    return out


def enumerate_heads(pick: np.ndarray, size: int) -> list[tuple[int, int]]:
    """The cells of a resample with a number for each drawn head, so that a head drawn twice counts as two."""
    return [(number // size, int(cell)) for number, cell in enumerate(pick)]


def show(name: str, found: dict[str, Any]) -> None:
    """Print the table of a model and text."""
    rows = found["rows"]
    print(f"\n{name}: {len(rows)} cells, {found['windows']} windows of {found['length']} tokens, {found['objective']}")
    print(f"{'':28}{'all':>20}{'significant':>20}{'AUC needed':>20}{'costliest':>20}{'inside':>20}")
    for predictor, scores in table(rows).items():
        cells = "".join(f"{f'{v:.2f} [{low:.2f}, {high:.2f}]':>20}" for v, low, high in scores.values())
        print(f"{predictor:28}{cells}")
    for change in dict.fromkeys(row["part"] for row in found["more"]):
        own = [row for row in found["more"] if row["part"] == change]
        truth = np.array([row["measured_A"]["change"] for row in own])
        error = np.array([row["measured_A"]["error"] for row in own])
        x = np.array([row["A"]["first"] + row["A"]["second_4"] for row in own])
        inside = (np.abs(x - truth) <= 2 * error + 0.1 * np.abs(truth)).mean()
        free = (truth + 2 * error <= 0.003).mean()
        ranks = spearmanr(x, truth)[0]
        print(f"{change:28}rank correlation {ranks:.2f}, inside {inside:.2f}, free in {free:.0%} of heads")


SHOWN = ("share of variance", "first term", "estimate, K = 4", "estimate on other windows", "measured on other windows")
START, END = "<!-- python bench/cost.py tables --page -->", "<!-- end -->"


def page_rows(found: dict[str, Any]) -> list[str]:
    """The tables of all models as Markdown, without intervals for those that the page does not compare."""
    lines = []
    for name, own in found.items():
        lines += ["", f"**{name}**: {len(own['rows'])} cells, objective: {own['objective']}", ""]
        lines += ["| predictor | rank correlation, significant cells | AUC, needed | costliest part named | inside |"]
        lines += ["|---|---|---|---|---|"]
        for predictor, scores in table(own["rows"]).items():
            if predictor in SHOWN:
                cells = (scores[key] for key in ("significant", "needed", "costliest", "inside"))
                lines.append(
                    f"| {predictor} | " + " | ".join(f"{v:.2f} [{a:.2f}, {b:.2f}]" for v, a, b in cells) + " |"
                )
        seconds = own["seconds"]
        times = f"Estimates of A {seconds['estimates A']:.1f} s, measurements {seconds['measured A']:.1f} s"
        lines += ["", f"{times} on {own['device']}."]
    return lines


def write_page(path: Path, found: dict[str, Any]) -> None:
    """Replace the generated block of a page."""
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(START)
    after = rest.split(END)[1]
    path.write_text("\n".join([before + START, *page_rows(found), "", END]) + after, encoding="utf-8")


def main() -> None:
    """Measure models, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run, tables = commands.add_parser("measure"), commands.add_parser("tables")
    for command in (run, tables):
        command.add_argument("--out", type=Path, required=True, help="a JSON file; what it holds of others is kept")
    tables.add_argument("--page", type=Path, help="a page whose block of tables is written anew")
    run.add_argument("model", help="a folder or a .gguf file")
    run.add_argument("--text", action="append", required=True, help="a text file; may be given several times")
    run.add_argument("--device", default="auto")
    run.add_argument("--length", type=int, default=128)
    run.add_argument("--windows", type=int, default=WINDOWS, help="in each of A and B")
    run.add_argument("--means", type=int, default=256, help="windows for the means by position")
    run.add_argument("--more", nargs="*", default=MORE, help="further changes")
    asked = parser.parse_args()
    found = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    if asked.command == "measure":
        asked.device = str(pick_device(asked.device))
        for text in asked.text:
            found[f"{Path(asked.model).stem} on {Path(text).stem}"] = measure(asked.model, text, asked)
            asked.out.write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")
    if asked.command == "tables" and asked.page:
        write_page(asked.page, found)
    for name, own in found.items():
        show(name, own)


if __name__ == "__main__":
    main()
