"""Differences between the language models of the study `kernels`, each arm at its best rate, paired by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from keyquery_studies.common.comparisons import difference, holm
from keyquery_studies.common.language_models import INITS
from keyquery_studies.common.objectives import OBJECTIVES
from keyquery_studies.kernels.arms import ARMS

Rows = Sequence[Mapping[str, Any]]
SETTING = ("objective", "share", "rope")


def language(rows: Rows) -> list[dict[str, Any]]:
    """Every arm in every setting: its losses, and its differences to both controls.

    `gap` is the difference to the unconstrained arm, `gap_init` that to the arm with a symmetric start, both with a
    95 % interval (`_low`, `_high`) and Holm's p over all of them (`_p`). `longer` is the gap after twice as many steps,
    and `longer_change` what they change the loss by.
    """
    settings = list(dict.fromkeys(tuple(row[name] for name in SETTING) for row in rows))
    table = []
    for setting in settings:
        arms = {
            arm: _of(rows, kernel=kernel, init=init, **dict(zip(SETTING, setting, strict=True)))
            for arm, (kernel, init) in ARMS.items()
        }
        plain, control = arms["unconstrained"], arms["symmetric init"]
        for arm, trained in arms.items():
            if not trained:
                continue
            row = {**dict(zip(SETTING, setting, strict=True)), "arm": arm, **_losses(trained)}
            row |= _named("gap", trained, plain, arm != "unconstrained")
            row |= _named("gap_init", trained, control, arm not in ("unconstrained", "symmetric init"))
            longer = difference(_longer(trained), _longer(plain), "loss")
            change = difference(_longer(trained), best(trained), "loss")["change"]
            row |= {"longer": longer["change"], "longer_change": change}
            table.append(row)
    return _adjusted(table, ("gap_p", "gap_init_p"))


def initialisations(rows: Rows) -> list[dict[str, Any]]:
    """Every start of the unconstrained kernel: losses, differences to the default start, and losses at other rates."""
    table = []
    for objective in OBJECTIVES:
        starts = {
            init: _of(rows, objective=objective, share=1.0, rope=False, kernel="general", init=init) for init in INITS
        }
        for init, trained in starts.items():
            if not trained:
                continue
            seeds = {row["seed"] for row in best(trained)}
            by_rate: dict[float, list[float]] = {}
            for row in trained:
                if row["steps"] == min(r["steps"] for r in trained) and row["loss"] is not None:
                    by_rate.setdefault(row["lr"], []).append(row["loss"])
            rates = {str(rate): mean(losses) for rate, losses in sorted(by_rate.items()) if len(losses) == len(seeds)}
            row = {"objective": objective, "init": init, **_losses(trained), "rates": rates}
            table.append(row | _named("gap", trained, starts["default"], init != "default"))
    return _adjusted(table, ("gap_p",))


def best(rows: Rows) -> list[Mapping[str, Any]]:
    """The rows at the rate with the lowest validation loss of the first seed, without those of doubled steps."""
    base = [row for row in rows if row["steps"] == min(r["steps"] for r in rows)]
    first = [row for row in base if row["seed"] == min(r["seed"] for r in base) and row["validation"] is not None]
    rate = min(first, key=lambda row: row["validation"])["lr"] if first else None
    return [row for row in base if row["lr"] == rate]


def _of(rows: Rows, **facts: Any) -> list[Mapping[str, Any]]:
    return [row for row in rows if all(row[name] == value for name, value in facts.items())]


def _longer(rows: Rows) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["steps"] > min(r["steps"] for r in rows)]


def _losses(rows: Rows) -> dict[str, Any]:
    """Rate, loss and stopping of an arm; `edge` if no lower or no higher rate was tried."""
    chosen = best(rows)
    losses = [row["loss"] for row in chosen]
    tried = {row["lr"] for row in rows}
    return {
        "seeds": len(losses),
        "lr": chosen[0]["lr"],
        "edge": chosen[0]["lr"] in (min(tried), max(tried)),
        "loss": mean(losses),
        "loss_sd": stdev(losses) if len(losses) > 1 else None,
        "parameters": chosen[0]["parameters"],
        "stopped_early": sum(row["best_step"] < 0.9 * row["steps"] for row in chosen),
    }


def _named(name: str, rows: Rows, control: Rows, wanted: bool) -> dict[str, Any]:
    """A difference at the best rates under a name; None where there is nothing to compare."""
    numbers = ("change", "low", "high", "p")
    empty: dict[str, Any] = dict.fromkeys(numbers)
    values = difference(best(rows), best(control), "loss") if wanted and control else empty
    return {name if key == "change" else f"{name}_{key}": values[key] for key in numbers}


def _adjusted(table: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The table with p-values adjusted for all of its comparisons."""
    places = [(row, name) for row in table for name in names if row[name] is not None]
    for (row, name), p in zip(places, holm([row[name] for row, name in places]), strict=True):
        row[name] = p
    return table
