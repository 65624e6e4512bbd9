"""Names of roles: which scores of a head clear their null level, over all heads and roles at once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keyquery.instruments.roles.patterns import POSITIONAL, ROLES, Scores
from keyquery.support.statistics import student

if TYPE_CHECKING:  # which runs models: opening a result does not need it
    from keyquery.instruments.roles.measure import Measured

ERROR = 0.05  # probability of naming any role that no head has
DATA = ("random", "needle", "text", "inputs")
LARGEST = 10.0  # of a score or an end of its interval, in a file
MIN_SEQUENCES = 8  # sequences without which no role is named
# The data that decides on a role, the first that there is: by content on random tokens, which have no other cause.
ORDERS = {
    "retrieval": ("needle",),
    "alignment": ("inputs", "text", "random"),
    **dict.fromkeys(POSITIONAL, ("text", "inputs", "random")),
    **dict.fromkeys(("induction", "duplicate_token"), ("random", "text", "inputs")),
}


def estimate(scores: Scores, tests: int) -> dict[str, Any] | None:
    """The mean score with its 95 % interval and null level, and whether it clears that at level 1 − 0.05/tests."""
    kept = scores.score.isfinite() & scores.null.isfinite()
    score, null = (values[kept].double() for values in scores)
    n = len(score)
    if n == 0:
        return None
    mean, level = float(score.mean()), float(null.mean())
    row: dict[str, Any] = {"score": mean, "low": None, "high": None, "null": level, "sequences": n, "clears": False}
    if n < 2:
        return row
    half = student(n - 1) * float(score.std()) / math.sqrt(n)
    excess = score - null
    margin = student(n - 1, 1 - ERROR / tests) * float(excess.std()) / math.sqrt(n)
    clears = n >= MIN_SEQUENCES and float(excess.mean()) - margin > 0
    return {**row, "low": mean - half, "high": mean + half, "clears": clears}


def decided(role: str, measured: Collection[str]) -> str | None:
    """The data that decides on a role, of those it was measured on."""
    return next((data for data in ORDERS[role] if data in measured), None)


def named(measured: Mapping[str, Measured], layers: Sequence[Any], least: float) -> list[dict[str, Any]]:
    """One row per head: its scores by role and data, its `roles`, and its `role`, the most specific of them."""
    tests = len({key for part in measured.values() for key in part})
    rows = []
    for layer, head in [(known, head) for known in layers for head in range(known.heads)]:
        scores: dict[str, dict[str, Any]] = {}
        for role in ROLES:
            key = (layer.index, head, role)
            of_role = {data: estimate(part[key], tests) for data, part in measured.items() if key in part}
            if of_role := {data: row for data, row in of_role.items() if row}:
                scores[role] = of_role
        roles = [role for role, of_role in scores.items() if _is_named(role, of_role, least)]
        about = {"layer": layer.index, "head": head, "name": f"{layer.name}.{head}", "kind": layer.kind}
        rows.append({**about, "role": roles[0] if roles else None, "roles": roles, "scores": scores})
    return rows


def _is_named(role: str, rows: Mapping[str, Mapping[str, Any]], least: float) -> bool:
    data = decided(role, rows)
    return data is not None and rows[data]["clears"] and rows[data]["score"] - rows[data]["null"] >= least


def flat_scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Score, interval and null level by role and data as columns such as "induction_random_low"."""
    return {
        f"{role}_{data}{'' if key == 'score' else f'_{key}'}": row[key]
        for role, of_role in scores.items()
        for data, row in of_role.items()
        for key in ("score", "low", "high", "null", "clears")
    }


def check_heads(model: Any, heads: Any) -> None:
    """Validate the facts and heads of a reading of roles, also of one loaded from a file."""
    known = isinstance(model, Mapping) and isinstance(model.get("name"), str) and type(model.get("layers")) is int
    require(known, "reading of roles: model", "an object with name and layers", model)
    require(bool(heads), "reading of roles: heads", "a non-empty list", heads)
    for index, head in enumerate(heads):
        check_roles(f"reading of roles: heads[{index}]", head)
        for key in ("layer", "head"):
            require(type(head.get(key)) is int, f"reading of roles: heads[{index}].{key}", "an integer", head.get(key))


def check_roles(where: str, row: Any) -> None:
    """Validate the `role`, `roles` and `scores` of a head, also of one loaded from a file."""
    require(isinstance(row, Mapping) and isinstance(row.get("scores"), Mapping), f"{where}.scores", "an object", row)
    names = row.get("roles")
    known = isinstance(names, list) and all(name in (*ROLES, None) for name in (*names, row.get("role")))
    require(known, f"{where}.roles", "a list of roles", names)
    for role, of_role in row["scores"].items():
        right = role in ROLES and isinstance(of_role, Mapping) and set(of_role) <= set(DATA)
        require(right, f"{where}.scores.{role}", "the scores of a role", of_role)
        for data, values in of_role.items():
            for key in ("score", "null", "low", "high"):
                value: Any = values.get(key) if isinstance(values, Mapping) else None
                right = type(value) in (int, float) and abs(value) <= LARGEST
                missing = value is None and key in ("low", "high")
                require(right or missing, f"{where}.scores.{role}.{data}.{key}", "a number", value)


def require(right: bool, where: str, expected: str, value: Any) -> None:
    """Raise unless a part of a reading is right; `where` begins with what the reading should be."""
    if not right:
        raise ValueError(f"not a {where} must be {expected}, got {value!r:.60}")
