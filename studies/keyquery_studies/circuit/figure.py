"""Figure of the study `circuit`: copying, roles and the costs of parts through training."""

from __future__ import annotations

from statistics import mean
from typing import Any

from keyquery.pages.colours import LIGHT
from keyquery_studies.circuit.measures import ROLES
from keyquery_studies.circuit.study import Circuit


def followed(reading: Circuit, pyplot: Any) -> Any:
    """By step: copying and the roles' scores, then the costs of the parts of either head; a thin line per seed."""
    rows = reading.followed()
    if not rows:
        raise ValueError("this reading holds no trained models to follow: run `keyquery study circuit` without models")
    figure, axes = pyplot.subplots(1, 3, figsize=(8.4, 2.8), layout="constrained", sharex=True)
    shown = {
        "copying": ("#59636e", ROLES[0]),
        ROLES[0]: (LIGHT["position"], ROLES[0]),
        ROLES[1]: (LIGHT["skew"], ROLES[1]),
    }
    for name, (colour, role) in shown.items():
        _lines(
            axes[0],
            [row for row in rows if row["role"] == role],
            "copying" if name == "copying" else "score",
            colour,
            name,
        )
    axes[0].set(ylabel="accuracy or attention", title="copying and roles")
    for axis, role in zip(axes[1:], ROLES[:2], strict=True):
        own = [row for row in rows if row["role"] == role]
        for part, colour in LIGHT.items():
            _lines(axis, own, part, colour, part)
        axis.set(title=f"parts of the {role.replace('_', '-')} head", ylabel="cost, nats per token")
    for axis in axes:
        axis.set(xlabel="step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=6)
    return figure


def _lines(axis: Any, rows: list[dict[str, Any]], name: str, colour: str, label: str) -> None:
    steps = sorted({row["step"] for row in rows})
    for seed in sorted({row["seed"] for row in rows}):
        own = sorted((row["step"], row[name]) for row in rows if row["seed"] == seed)
        axis.plot(*zip(*own, strict=True), color=colour, linewidth=0.5, alpha=0.5)
    axis.plot(steps, [mean(r[name] for r in rows if r["step"] == at) for at in steps], color=colour, label=label)
