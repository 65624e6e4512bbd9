"""Softmax, our primal layer and the released one on Text of the arena: each at its best rate, with several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from keyquery_studies.common.rates import tuned
from keyquery_studies.common.store import Store
from keyquery_studies.primal.arena.tasks import SPLITS, load_arena
from keyquery_studies.primal.arena.text_training import Late, Split, TextRun, TextTraining

SIDES = ("general", "primal", "released")  # what is compared
SAMPLINGS = ("primal, sampling padding", "released, sampling real tokens")  # one factor changed; on demand
RATES = (1e-4, 3e-4, 1e-3)  # the published rate, and higher ones for fewer steps


def compared(
    runs: Sequence[TextRun],
    seeds: Sequence[int],
    folder: Path,
    device: str,
    late: Late = lambda: False,
    rates: Sequence[float] = RATES,
) -> list[dict[str, Any]]:
    """Every arm at all rates with the first seed, then at its best rate with all seeds; a single rate is not tuned.

    Rows are kept in `folder`, and those of an earlier call are not computed again, unless time ended them; after
    `late`, none is begun, and those under way end at their next evaluation.
    """
    rows: dict[TextRun, dict[str, Any]] = {}

    def run(batch: Sequence[TextRun]) -> list[dict[str, Any]]:
        rows.update(zip(batch, results := trained(batch, folder, device, late), strict=True))
        return results

    arms = [replace(run, seed=seeds[0]) for run in runs]
    best = [replace(arm, lr=rates[0]) for arm in arms] if len(rates) == 1 else tuned(arms, rates, run)
    run([replace(own, seed=seed) for own in best for seed in seeds])
    return [row for row in rows.values() if not row.get("partial")]


def trained(runs: Sequence[TextRun], folder: Path, device: str, late: Late = lambda: False) -> list[dict[str, Any]]:
    """The rows of all runs; those without one are trained side by side, by attention."""
    store = Store(folder / "results")
    splits: dict[str, Split] = {}
    for attention in dict.fromkeys(run.attention for run in runs):
        todo = [run for run in dict.fromkeys(runs) if run.attention == attention and not _finished(store, run)]
        if todo and not late():
            splits = splits or _load(folder, device, todo[0].length)
            for run, row in zip(todo, TextTraining(todo, splits, device).train(late), strict=True):
                store.write(run.name, row)
    missing = {"partial": True, "validation": None}
    return [store.read(run.name) if store.done(run.name) else missing for run in runs]


def _finished(store: Store, run: TextRun) -> bool:
    """Whether a run has a row that was not cut short by the time."""
    return store.done(run.name) and store.read(run.name)["ended"] != "time"


def _load(folder: Path, device: str, length: int) -> dict[str, Split]:
    arrays = load_arena("text", folder)
    cut = {split: (tokens[:, :length].copy(), labels) for split, (tokens, labels) in arrays.items()}
    return {
        split: (torch.from_numpy(cut[split][0]).to(device), torch.from_numpy(cut[split][1]).to(device))
        for split in SPLITS
    }
