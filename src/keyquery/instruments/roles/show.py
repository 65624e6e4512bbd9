"""Head roles in the terminal, as a figure and as a page: layers by heads in the colour of their roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keyquery.checkpoints.labels import name_of
from keyquery.instruments.roles.naming import ORDERS, decided
from keyquery.instruments.roles.patterns import ROLES
from keyquery.instruments.roles.roles import Roles
from keyquery.pages.colours import ROLES as TONES
from keyquery.pages.components import heads_frame, key_of, measure, versioned
from keyquery.pages.document import document
from keyquery.pages.tables import Text, columns_table
from keyquery.support.extras import optional
from keyquery.support.printable import counted

LISTED = 6  # heads that are listed per role
ON = {"random": "repeated random tokens", "needle": "needles", "text": "the text", "inputs": "the inputs"}
GROUP = "roles"  # of the measures of a page


def role_name(role: str) -> str:
    """A role as it is printed."""
    return role.replace("_", "-")


def measured_on(reading: Roles) -> str:
    """The data that roles were measured on, and how many sequences there are of each."""
    counts: dict[str, int] = {}
    for of_role in (of_role for head in reading.heads for of_role in head["scores"].values()):
        for data, row in of_role.items():
            counts[data] = max(counts.get(data, 0), row.get("sequences") or 0)
    return ", ".join(f"{ON[data]} ({count} sequences)" for data, count in counts.items())


def rule(facts: Mapping[str, Any]) -> list[str]:
    """How roles are named, in two lines."""
    least, level = facts.get("least", 0), f"{100 * (1 - facts.get('error', 0.05)):.0f} %"
    return [
        f"A role is named where its score exceeds its null level by at least {least:g}, and does so significantly: at "
        f"{level} for all heads and roles together (Bonferroni).",
        "Null level: uniform attention over visible keys; for content, at least the attention to other queries' keys.",
    ]


# In the terminal


def lines(reading: Roles) -> list[Any]:
    """Title, a row per role with its strongest heads, and the rule by which roles are named."""
    model = reading.model
    title = f"{model['name']}: roles of {len(reading.heads)} heads in {model['layers']} layers"
    top = [Text(title, style="bold"), Text(f"on {measured_on(reading)}", style="dim")]
    notes = (f"Note: {note}." for note in reading.notes)
    return [*top, "", role_table(reading.heads, model), "", *rule(reading.provenance), *notes]


def role_table(heads: Sequence[Mapping[str, Any]], model: Mapping[str, Any]) -> Any:
    """A row per role: how many heads are named so, the range of null levels, and the strongest of these heads."""
    table = columns_table("role", "heads", Text("on"), "null", Text("strongest, ± half of the 95 % interval"))
    for role in ROLES:
        scored = [head for head in heads if role in head["scores"]]
        data = decided(role, scored[0]["scores"][role]) if scored else None
        if data is None:
            continue
        rows = [(head, head["scores"][role][data]) for head in scored if data in head["scores"][role]]
        levels = [row["null"] for _, row in rows]
        named = sorted((pair for pair in rows if role in pair[0]["roles"]), key=lambda pair: -pair[1]["score"])
        shown = [_strength(name_of(model, head["layer"], head["head"]), row) for head, row in named[:LISTED]]
        more = [f"and {len(named) - LISTED} more"] if len(named) > LISTED else []
        low, high = (f"{end(levels):.2f}" for end in (min, max))
        table.add_row(
            role_name(role),
            str(len(named)),
            Text(data),
            low if low == high else f"{low}–{high}",
            Text(", ".join([*shown, *more]) or "–"),
        )
    return table


def _strength(name: str, row: Mapping[str, Any]) -> str:
    if row["low"] is None:
        return f"{name} {row['score']:.2f}"
    return f"{name} {row['score']:.2f} ±{(row['high'] - row['low']) / 2:.2f}"


# As a figure


def role_map(reading: Roles, pyplot: Any) -> Any:
    """Every head in the colour of its most specific role."""
    rows, columns = (1 + max(head[way] for head in reading.heads) for way in ("layer", "head"))
    figure, axis = pyplot.subplots(figsize=(2.6 + 0.25 * columns, 1.0 + 0.2 * rows), layout="constrained")
    values = np.full((rows, columns), np.nan)
    for head in reading.heads:
        if head["role"] is not None:
            values[head["layer"], head["head"]] = ROLES.index(head["role"])
    palette = optional("matplotlib.colors", "plot").ListedColormap([TONES[name] for name in ROLES])
    axis.imshow(values, vmin=-0.5, vmax=len(ROLES) - 0.5, cmap=palette, aspect="auto")
    shown = [role for index, role in enumerate(ROLES) if (values == index).any()]
    marks = [pyplot.Line2D([], [], marker="s", linestyle="", color=TONES[role]) for role in shown]
    axis.legend(marks, list(map(role_name, shown)), frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axis.set(xlabel="head", ylabel="layer", title=reading.model["name"])
    axis.locator_params(integer=True, nbins=12)
    return figure


FIGURES = {"map": role_map}


# As a page


def page(reading: Roles) -> str:
    """The page: layers by heads in the colour of their role or by the score of one, and the scores of one head."""
    heads, model = reading.heads, reading.model
    named = [head for head in heads if head["role"]]
    # It opens on the head with the highest score of the most specific role.
    opened = min(named, key=lambda head: (ROLES.index(head["role"]), -_score(head)), default=heads[0])
    sentence = f"None of {len(heads)} heads has a role."
    if named:
        strongest = f"the strongest {role_name(opened['role'])} head is {key_of(opened)} ({_score(opened):.2f})"
        sentence = f"{len(named)} of {counted(len(heads), 'head')} have a role; {strongest}."
    details = [
        {"chips": role_chips(head), "about": _about(head), "blocks": [{"type": "roles"}] if head["scores"] else []}
        for head in heads
    ]
    tags = [{"value": n, "name": role_name(role), "tone": _tone(role)} for role, n in reading.summary.items()]
    tab = {
        "frame": heads_frame(heads, role_measures(heads), model.get("labels") or []),
        "state": {"at": key_of(opened), "map": "role"},
        "blocks": [
            {"type": "summary", "sentences": [sentence], "tags": tags, "note": "a head may have several roles"},
            {"type": "map", "place": "seven", "quick": ["role"]},
            {"type": "detail", "place": "five", "items": details},
            {"type": "items"},
        ],
    }
    facts = f"{model['layers']} layers · {len(heads)} heads · on {measured_on(reading)}"
    notes = [*rule(reading.provenance), *versioned(reading.notes, reading.provenance)]
    return document(str(model["name"]), "roles of heads", [tab], facts, notes)


def _score(head: Mapping[str, Any]) -> float:
    """The score of a head's role, on the data that decides."""
    of_role = head["scores"][head["role"]]
    return float(of_role[decided(head["role"], of_role)]["score"])


def _about(head: Mapping[str, Any]) -> str:
    return f"{head['name']} · cross-attention" if head["kind"] == "cross" else str(head["name"])


def _tone(role: str) -> str:
    return f"var(--role-{role})"


def role_chips(head: Mapping[str, Any]) -> list[list[str]]:
    """The roles of a head, as marks behind its name."""
    return [[role_name(role), _tone(role)] for role in head["roles"]]


def role_measures(heads: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The role of each head as a colour, and each score; some heads may lack the fields `role`, `roles`, `scores`."""
    index = {role: number for number, role in enumerate(ROLES)}
    measures = [
        measure(
            "role",
            "role",
            [index.get(head["role"], len(ROLES)) if "scores" in head else None for head in heads],
            group=GROUP,
            unit="the most specific role that is named",
            words=[", ".join(map(role_name, head.get("roles", []))) or "none" for head in heads],
            names=[*map(role_name, ROLES), "none"],
            tones=[*map(_tone, ROLES), None],
        )
    ]
    for role in ROLES:
        scores = [head.get("scores", {}).get(role, {}) for head in heads]
        for data in (data for data in ORDERS[role] if any(data in of_role for of_role in scores)):  # what decides first
            rows = [of_role.get(data, {}) for of_role in scores]
            facts: dict[str, Any] = {key: [row.get(key) for row in rows] for key in ("low", "high", "null")}
            facts |= {"group": GROUP, "unit": Roles.units[role], "form": "fixed", "digits": 3}
            facts |= {"least": -1 if role == "alignment" else 0, "most": 1}
            values = [row.get("score") for row in rows]
            measures.append(measure(f"role.{role}.{data}", f"{role_name(role)}, {data}", values, **facts))
    return measures
