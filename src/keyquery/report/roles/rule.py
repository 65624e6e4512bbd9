"""Shared by all displays of roles: their names, what they were measured on, and the rule by which they are named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyquery.instruments.roles.roles import Roles

ON = {"random": "repeated random tokens", "needle": "needles", "text": "the text", "inputs": "the inputs"}


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
