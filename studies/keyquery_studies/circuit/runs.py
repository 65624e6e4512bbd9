"""Runs of the copying circuit that write rows as they go: a checkpoint, or training through the phase change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from keyquery.forms.parts import PARTS
from keyquery.listening.hooks import evaluating
from keyquery_studies.circuit.measures import (
    copying,
    costs,
    everywhere,
    heads_of,
    highest,
    losses,
    means_of,
    settings_of,
)
from keyquery_studies.circuit.score_changes import Change
from keyquery_studies.circuit.training import Plan, Size, Weights, model_of, train
from keyquery_studies.common.store import Store
from keyquery_studies.common.subjects import Material, Subject

Late = Callable[[], bool]
SEQUENCES = 32  # on which trained models are measured
MATCHED = 1000  # seed of the sequences on which trained models are measured, plus their own seed


def checkpoint(
    subject: Subject,
    texts: dict[str, str],
    store: Store,
    late: Late,
    *,
    half: int = 16,
    bos: bool = False,
    sequences: int = 24,
    of_role: int = 1,
    also: Sequence[tuple[int, int]] = (),
    by_both: Sequence[tuple[int, int]] = (),
    role_length: int = 49,
    role_sequences: int = 16,
) -> None:
    """Every result of one model, each in a file of its own; those that exist are not computed again.

    With `bos`, sequences begin with that token where the tokenizer adds none. The heads of highest role scores are
    estimated, after those of `also`; those of `by_both` also about global means.
    """
    model, name = subject.model, subject.facts["name"]
    material = Material(texts, subject.tokenizer, True, subject.facts["vocabulary"] or 0)
    before = [subject.tokenizer.bos_token_id] if bos and not material.before else material.before
    task = copying(material.pool, before, sequences, half, 1)

    def once(what: str, compute: Callable[[], Any]) -> Any:
        file = f"{name}-{what}.json"
        if not store.done(file):
            if late():
                return []
            result = compute()
            if late():  # perhaps cut short
                return result
            store.write(file, result)
        return store.read(file)

    with evaluating(model):
        heads = once("heads", lambda: heads_of(model, subject.tokenizer, role_length, role_sequences))
        means = means_of(model, task, ("position", "global"))

        def measured(settings: list[Change]) -> list[dict[str, Any]]:
            return list(costs(model, task, settings, means, late))

        for place in dict.fromkeys((*also, *highest(heads, of_role))):
            settings = settings_of([place])
            if place in by_both:
                settings += [Change(*place, part, "mean", "global") for part in PARTS]
            once(f"costs-{place[0]}.{place[1]}", partial(measured, settings))
        once("everywhere", lambda: list(everywhere(model, task, means["position"])))


def trained(store: Store, size: Size, plan: Plan, late: Late) -> None:
    """Train all seeds at once, and at each step to be kept measure every head of every seed."""
    for step, weights, recent in train(size, plan, late=late):
        last = step == max(plan.kept)
        for seed in range(plan.seeds):
            file = f"seed{seed}-{step:06}.json"
            if not store.done(file):
                row = snapshot(weights, seed, size, plan, last)
                store.write(file, {"step": step, "training": _number(recent[seed]), **row})


def snapshot(weights: Weights, seed: int, size: Size, plan: Plan, controls: bool) -> dict[str, Any]:
    """Roles, symmetry and costs of the parts of one seed; with `controls` also resampled and random parts."""
    model = model_of(weights, size, seed)
    half = min(plan.length, size.vocabulary) // 2  # sequences without a repeat need as many tokens as there are
    task = copying(torch.arange(size.vocabulary), [], SEQUENCES, half, MATCHED + seed)
    means = means_of(model, task)
    places = [(layer, head) for layer in range(size.depth) for head in range(size.heads)]
    settings = settings_of(places) if controls else settings_of(places, ["mean"])
    nats, right = (
        torch.cat(each) for each in zip(*(losses(model, task, rows) for rows in task.batches()), strict=True)
    )
    return {
        "seed": seed,
        "repeated": float(nats.mean()),
        "copying": float(right.mean()),
        "heads": heads_of(model, None, plan.length, 16),
        "costs": list(costs(model, task, settings, means)),
        "everywhere": list(everywhere(model, task, means["position"])) if controls else [],
    }


def _number(value: torch.Tensor) -> float | None:
    return None if bool(value.isnan()) else float(value)
