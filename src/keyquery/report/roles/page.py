"""Head roles as a self-contained HTML page, and their data on the page of a look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyquery.instruments.roles.naming import decided
from keyquery.instruments.roles.patterns import ROLES
from keyquery.instruments.roles.roles import Roles
from keyquery.pages.colours import role_tones
from keyquery.pages.document import document
from keyquery.reading import short
from keyquery.report.roles.rule import measured_on, rule

SCRIPTS = ("elements.js", "role_scores.js", "roles.js")
DIGITS = 3


def roles_page(reading: Roles) -> str:
    """The page: layers by heads in the colour of their role or by the score of one, and the scores of one head."""
    versions = reading.provenance.get("versions", {})
    notes = [f"{note[:1].upper()}{note[1:]}." for note in reading.notes]
    data = {
        "name": reading.model["name"],
        "facts": f"{reading.model['layers']} layers · {len(reading.heads)} heads · on {measured_on(reading)}",
        "labels": list(reading.model.get("labels") or []),
        "counts": list(reading.summary.items()),
        "heads": [
            {**{key: head.get(key) for key in ("layer", "head", "name", "kind")}, "roles": role_data(head)}
            for head in reading.heads
        ],
        **role_facts(),
        "notes": [*rule(reading.provenance), *notes, f"keyquery {versions.get('keyquery', '')}".strip()],
    }
    return document("roles", str(reading.model["name"]), SCRIPTS, data, "roles", own_style=role_tones())


def role_facts() -> dict[str, Any]:
    """What the scripts need to know of roles: their order and units."""
    return {"roles": list(ROLES), "role_units": {role: Roles.units[role] for role in ROLES}}


def role_data(head: Mapping[str, Any]) -> dict[str, Any]:
    """The roles of a head for the scripts: scores as lists, those on the data that decides first."""
    scores = {}
    for role, of_role in head["scores"].items():
        first = decided(role, of_role)
        order = sorted(of_role, key=lambda data: data != first)
        scores[role] = [
            short([data, *(of_role[data][key] for key in ("score", "low", "high", "null"))], DIGITS) for data in order
        ]
    return {"role": head["role"], "named": list(head["roles"]), "scores": scores}
