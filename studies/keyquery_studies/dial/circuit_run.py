"""Runs of the copying circuit that write their rows as they go: one checkpoint, or training through the phase change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.capture.hooks import evaluating
from keyquery_studies.common.store import Store
from keyquery_studies.dial.circuit import (
    ROLES,
    Change,
    all_parts,
    copying,
    costs,
    everywhere,
    heads_of,
    losses,
    reading,
    selected,
    settings_of,
)
from keyquery_studies.dial.phase_change import Plan, Size, Weights, model_of, train
from keyquery_studies.dial.sequences import Material
from keyquery_studies.dial.study import Subject

Late = Callable[[], bool]
# Heads with the largest effects by the earlier definition (global means), which are measured by both.
EARLIER = ((7, 2), (8, 1), (3, 4), (7, 7), (16, 0), (8, 0))


def checkpoint(
    subject: Subject,
    texts: dict[str, str],
    store: Store,
    late: Late,
    *,
    half: int = 63,
    screened: int = 16,
    sequences: int = 64,
    most: int = 12,
    of_role: int = 3,
    also: Sequence[tuple[int, int]] = EARLIER,
    roles_only: bool = False,
) -> None:
    """Every result of one model, each in a file of its own; those that exist are not computed again.

    `roles_only`: no screen of all heads, and the heads of highest role scores alone are estimated.
    """
    model = subject.model
    name = subject.facts["name"]
    material = Material(texts, subject.tokenizer, True, subject.facts["vocabulary"] or 0)
    screen_task, task = (
        copying(material.pool, material.before, count, half, seed) for count, seed in ((screened, 0), (sequences, 1))
    )

    def once(what: str, compute: Callable[[], Any]) -> Any:
        file = f"{name}-{what}.json"
        if not store.done(file):
            if late():
                return []
            store.write(file, compute())
        return store.read(file)

    with evaluating(model):
        heads = once("heads", lambda: heads_of(model, subject.tokenizer, 2 * half + 1, min(32, sequences)))
        screen = []
        if not roles_only:
            screen = once("screen", lambda: _brief(costs(model, screen_task, all_parts(model), late=late)))
        known = {(row["layer"], row["head"]) for row in heads}
        also = [place for place in also if place in known]
        places = [*selected(heads, screen, most, of_role), *also]
        settings = settings_of(list(dict.fromkeys(places)))
        once("costs", lambda: list(costs(model, task, settings, late=late)))
        if also:
            old = [Change(*place, part, "mean", "global") for place in also for part in ("popularity", "position")]
            once("global", lambda: list(costs(model, task, old, ("global",), late)))
        if not roles_only:
            once("everywhere", lambda: list(everywhere(model, task)))
        for text in () if roles_only else texts:
            windows = material.windows(text, 32, 2 * half + 1), material.windows(text, 64, 2 * half + 1, True)
            left_out = [change for change in settings if change.kind == "mean"]
            on_text = reading(*windows)
            once(f"text-{text}", lambda on_text=on_text, left=left_out: list(costs(model, on_text, left, late=late)))
            once(f"text-{text}-everywhere", lambda on_text=on_text: list(everywhere(model, on_text)))


def _brief(rows: Any) -> list[dict[str, Any]]:
    """Rows without the values of single sequences."""
    return [{key: value for key, value in row.items() if key != "values"} for row in rows]


def snapshots(tokens: Tensor, folder: Path, size: Size, plan: Plan, device: str, late: Late) -> list[Path]:
    """Train all seeds, and write their weights at the steps to be kept."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for step, weights, seconds in train(tokens, size, plan, device, late):
        path = folder / f"{step:06}.pt"
        torch.save({"step": step, "seconds": seconds, "weights": weights}, path)
        print(f"step {step}: {seconds:.1f} s", flush=True)
        paths.append(path)
    return paths


def snapshot(
    kept: dict[str, Any], seed: int, size: Size, held_out: Tensor, device: str, final: bool, length: int, sequences: int
) -> dict[str, Any]:
    """Roles, symmetry and costs of the parts of one seed at one step; with both controls at the `final` one."""
    weights: Weights = kept["weights"]
    model: nn.Module = model_of(weights, size, seed).to(device)
    pool, half = held_out.unique().long(), length // 2
    task = copying(pool, [], sequences, half, 1000 + seed)
    windows = held_out[: len(held_out) // length * length].reshape(-1, length).long()
    text = reading(windows[:sequences], windows[sequences : 2 * sequences])
    whole = slice(0, sequences)
    places = [(layer, head) for layer in range(size.depth) for head in range(size.heads)]
    settings = settings_of(places) if final else all_parts(model)
    nats, right = losses(model, task, whole)
    rows = list(costs(model, task, settings))
    return {
        "seed": seed,
        "step": kept["step"],
        "text": float(losses(model, text, whole)[0].mean()),
        "repeated": float(nats.mean()),
        "copying": float(right.mean()),
        "heads": heads_of(model, None, length, min(32, sequences)),
        "costs": rows if final else _brief(rows),
        "text_costs": _brief(costs(model, text, all_parts(model))) if final else [],
        "everywhere": _brief(everywhere(model, task)) if final else [],
    }


__all__ = ["ROLES", "checkpoint", "snapshot", "snapshots"]
