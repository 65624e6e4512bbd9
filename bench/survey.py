"""Surveys: what two workers are worth, what a head costs among few and among many, and 10,000 models of 8B on paper.

    python bench/survey.py                   # everything; some minutes
    python bench/survey.py workers heads eight

Two workers against one need two cores that nobody else uses: the load of the machine is told with the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from distributed import LocalCluster
from harness import RESULTS, publish, row
from safetensors.torch import save_file

from keyquery.reading import provenance
from keyquery.survey import run
from keyquery.survey.executors import on_cluster
from keyquery.survey.find_models import find_models
from keyquery.survey.worker import HERE, Job

REPEATS = 3
MODELS, LAYERS, NODES, CORES = 10_000, 32, 100, 64


def llama(folder: Path, layers: int, heads: int, shared: int, width: int, rank: int, dtype: torch.dtype) -> Path:
    """Query and key weights and norms of a Llama: what a survey reads of it."""
    folder.mkdir(parents=True)
    tensors = {}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        for role, count in (("q", heads), ("k", shared)):
            tensors[f"{block}.self_attn.{role}_proj.weight"] = (torch.randn(count * rank, width) / width**0.5).to(dtype)
        tensors[f"{block}.input_layernorm.weight"] = torch.ones(width, dtype=dtype)
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "num_attention_heads": heads, "num_key_value_heads": shared, "head_dim": rank}
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": width, "rope_theta": 10000.0}))
    return folder


class Clock:
    """When each model was done: the first ones, while workers start, do not count."""

    def __init__(self, skipped: int) -> None:
        self.skipped, self.times = skipped, list[float]()

    def __call__(self, items: Iterable[Any], what: str, total: int) -> Iterator[Any]:
        """Progress, as a survey takes it."""
        for item in items:
            self.times.append(time.monotonic())
            yield item

    def rate(self) -> float:
        """Models a second."""
        counted = self.times[self.skipped :]
        return (len(counted) - 1) / (counted[-1] - counted[0])


def workers(place: Path) -> list[dict[str, Any]]:
    """Layers a second of one and of two processes, in turn, from when both are at work; and their CPU time.

    Where others use the cores too, only the latter says what a second process is worth. Starting processes is left out
    by what a survey takes that has nothing left to do.
    """
    layers = 12
    models = [llama(place / f"m{i}", layers, 12, 12, 768, 64, torch.float32) for i in range(8)]
    rates: dict[int, list[float]] = {1: [], 2: []}
    costs: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(REPEATS):
        for count in (1, 2):
            out, clock, before = place / f"out{turn}{count}", Clock(skipped=2), cpu_of_all()
            run(models, out, workers=count, progress=clock)
            between = cpu_of_all()
            run(models, out, workers=count)
            costs[count].append((between - before) - (cpu_of_all() - between))
            rates[count].append(layers * clock.rate())
            shutil.rmtree(out)
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    spent = [two / one for one, two in zip(costs[1], costs[2], strict=True)]
    return [
        row("survey: layers of random weights of GPT-2 small's shape a second, one process", rates[1], "/s", "—"),
        row("survey: the same, two processes over one", ratios, "×", "≥ 1.7 ×"),
        row("survey: CPU time of the same work, two processes over one", spent, "×", "≤ 1.15 ×"),
    ]


def cpu_of_all() -> float:
    """CPU seconds of this process and of all that it has started and waited for."""
    return sum(os.times()[:4])


def heads(place: Path) -> list[dict[str, Any]]:
    """CPU time a head, all of a survey in it: opening, measuring, records, pages, JSON and Parquet."""
    first = llama(place / "first", 10, 10, 10, 80, 8, torch.float32)
    costs, rows = {}, []
    for count in (100, 1_000, 10_000, 100_000):
        folder = place / f"zoo{count}"
        for i in range(count // 100):
            (folder / f"m{i:04}").mkdir(parents=True)
            for name in ("model.safetensors", "config.json"):
                os.link(first / name, folder / f"m{i:04}" / name)
        samples = []
        for turn in range(REPEATS if count < 10_000 else 1):
            start = time.process_time()
            run([folder], place / f"out{count}{turn}", workers=1)
            samples.append(1e3 * (time.process_time() - start) / count)
            shutil.rmtree(place / f"out{count}{turn}")
        costs[count] = sorted(samples)[len(samples) // 2]
        rows.append(row(f"survey: CPU time a head (width 80, rank 8) among {count:,} heads", samples, "ms", "—"))
    ratio = costs[100_000] / costs[100]
    return [*rows, row("survey: cost a head among 100,000 heads over that among 100", [ratio], "×", "≤ 1.25 ×")]


def eight(place: Path) -> list[dict[str, Any]]:
    """A layer of an 8B Llama with its share of the files, what is read and written, and what a scheduler adds."""
    layers = 2
    model = llama(place / "eight", layers, 32, 8, 4096, 128, torch.bfloat16)
    run([llama(place / "warm", 1, 2, 2, 64, 32, torch.bfloat16)], place / "warmed", workers=1)
    costs = []
    for turn in range(REPEATS):
        start = time.process_time()
        run([model], place / f"out{turn}", workers=1)
        costs.append((time.process_time() - start) / layers)
    scale = LAYERS / layers
    written = (place / "out0" / "models" / "eight.json").stat().st_size * scale / 1e6
    read = (model / "model.safetensors").stat().st_size * scale / 1e9
    job = scheduling(place)
    hours = MODELS * LAYERS * sorted(costs)[1] / (NODES * CORES) / 3600
    queue = MODELS * sorted(job)[1] / 1e3 / 3600
    words = f"{MODELS:,} models of 8B on {NODES} nodes of {CORES} cores, on paper"
    return [
        row("survey: a layer of random weights of an 8B Llama's shape, 32 heads, with all files", costs, "CPU s", "—"),
        row("survey: read of its checkpoint", [read], "GB", "—"),
        row("survey: its JSON", [written], "MB", "—"),
        row("survey: what a Dask scheduler adds to a job", job, "ms", "—"),
        row(f"survey: {words}: workers", [hours], "h", "—"),
        row(f"survey: {words}: one scheduler and its client hand jobs out", [queue], "h", "—"),
    ]


def scheduling(place: Path) -> list[float]:
    """Milliseconds of this process per job that finds its model done, through a scheduler and its client."""
    model, folder = llama(place / "tiny", 1, 2, 2, 16, 8, torch.float32), place / "queue"
    run([model], folder, workers=1)
    (entry,) = find_models([model])
    token = (folder / "records" / HERE).read_text().split()[-1]
    jobs = [Job(entry, str(folder), token, tuple(provenance()["versions"].items()))] * 1500
    samples = []
    with LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        list(on_cluster(jobs[:20], cluster.scheduler_address))  # the worker imports what it needs
        for _ in range(REPEATS):
            start = time.process_time()
            list(on_cluster(jobs, cluster.scheduler_address))
            samples.append(1e3 * (time.process_time() - start) / len(jobs))
    return samples


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", default=["workers", "heads", "eight"])
    parts = options.parse_args().parts
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = RESULTS / "survey.json"
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "provenance": {}}
    kept = {r["part"]: [x for x in before["rows"] if x["part"] == r["part"]] for r in before["rows"]}
    loads = dict(before["provenance"].get("load", {}))
    for part in parts:
        loads[part] = round(os.getloadavg()[0], 2)  # before: what others do
        with tempfile.TemporaryDirectory(dir=os.environ.get("KEYQUERY_BENCH")) as place:
            kept[part] = [{**r, "part": part} for r in globals()[part](Path(place))]
    publish("survey", [r for part in ("workers", "heads", "eight") for r in kept.get(part, [])], load=loads)


if __name__ == "__main__":
    main()
