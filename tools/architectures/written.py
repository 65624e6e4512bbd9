"""Findings of the search as a family: few entries, short names, and a TOML file that a person can read."""

from __future__ import annotations

import re
from typing import Any

from tools.architectures.search import Finding

USUAL = {"heads": "num_attention_heads", "gain_offset": 0.0}
ORDER = (
    "kind",
    "causal",
    "order",
    "transposed",
    "gated",
    "config",
    "of",
    "heads",
    "scale",
    "softcap",
    "window",
    "rope",
    "rope_kinds",
    "axes",
    "grid",
)
ROLES: tuple[str, ...] = (
    "query",
    "query_down",
    "query_latent_norm",
    "query_up",
    "key",
    "key_down",
    "key_latent_norm",
    "key_up",
    "value",
)
ROLES += ("query_bias", "query_shift", "fused", "output", "module", "norm", "first_norm", "query_norm", "key_norm")


def family_tables(model_type: str, findings: list[Finding]) -> dict[str, Any]:
    """The tables of a family's TOML file: findings that differ in nothing but their layer become one entry."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(_alike(finding), []).append(finding)
    members = sorted(groups.values(), key=lambda group: not _textual(group[0]))
    entries = [_entry(group, [f for other in members if other is not group for f in other]) for group in members]
    _by_kind(entries, members)
    merged: dict[str, dict[str, Any]] = {}
    for entry in entries:
        merged.setdefault(repr(entry), entry)
    gaps = any({f.layer for f in group} < set(range(f.depth)) for group in groups.values() for f in group[:1])
    tables = {"model_types": [model_type], "by_names": False, **({"gaps": True} if gaps else {})}
    return {**tables, "attention": list(merged.values())}


def _by_kind(entries: list[dict[str, Any]], members: list[list[Finding]]) -> None:
    """Entries of the same names apply to layers of different kinds."""
    for i, entry in enumerate(entries):
        same = [j for j, other in enumerate(entries) if _anchor_of(other) == _anchor_of(entry)]
        kinds = {f.kind for f in members[i]}
        if len(same) > 1 and not any(kinds & {f.kind for f in members[j]} for j in same if j != i):
            entry["kinds"] = sorted(kinds)


def _anchor_of(entry: dict[str, Any]) -> str:
    return str(next(entry["names"][role] for role in ("fused", "key_down", "query") if role in entry["names"]))


def _alike(finding: Finding) -> str:
    facts = {k: v for k, v in finding.facts.items() if k not in ("rope", "norm_kind", "causal")}
    unread = finding.facts.get("rope") == "unread"
    anchor = next(finding.names[role] for role in ("fused", "key_down", "query") if role in finding.names)
    prefix = re.sub(r"\d+", "0", anchor)
    return repr((prefix, sorted(facts.items()), unread))


def _textual(finding: Finding) -> bool:
    section = str(finding.facts.get("config", ""))
    return "text" in section or "language" in finding.owner or not section


def _entry(group: list[Finding], others: list[Finding]) -> dict[str, Any]:
    latest = group[-1]
    entry = {key: value for key, value in latest.facts.items() if USUAL.get(key) != value}
    rotated = [f for f in group if f.facts.get("rope") in ("half", "interleaved") and f.rotated]
    if rotated:
        entry["rope"] = rotated[0].facts["rope"]
        with_rope, without = {f.kind for f in rotated}, {f.kind for f in group if not f.rotated}
        if without and not with_rope & without:
            entry["rope_kinds"] = sorted(with_rope)
    if any(f.facts.get("norm_kind") == "rms" for f in group):
        entry["norm_kind"] = "rms"
    names = dict(latest.names)
    norms = [f.names.get("norm") for f in group if f.names.get("norm")]
    feeding = next((n for n in norms if n and ("{previous}" in n or "{layer}" in n)), norms[0] if norms else None)
    if feeding is None:
        names.pop("norm", None)
    else:
        names["norm"] = feeding
        first = next(
            (f.names["norm"] for f in group if f.layer == 0 and f.names.get("norm") not in (None, feeding)), None
        )
        if first is not None:
            names["first_norm"] = first
    cut = _cut(latest, others)
    entry["names"] = {
        role: name[cut:] if name[:cut] == anchor_of(latest)[:cut] else name for role, name in names.items()
    }
    return entry


def anchor_of(finding: Finding) -> str:
    """The name that a finding's other names are cut like."""
    return next(finding.names[role] for role in ("fused", "key_down", "query") if role in finding.names)


def _cut(finding: Finding, others: list[Finding]) -> int:
    """How much of the names can be left out: they must not match tensors of other entries, but for those of text."""
    anchor = anchor_of(finding)
    before = anchor.split("{layer}")[0] if "{layer}" in anchor else anchor.rpartition(".")[0].rpartition(".")[0] + "."
    if before.rstrip(".").rpartition(".")[2].isdecimal():  # a stage's number
        return len(before)
    starts = [0, *(match.end() for match in re.finditer(r"\.", before))]
    starts = [start for start in starts if start < len(before)] or [0]
    for start in reversed(starts):
        pattern = re.escape(anchor[start:]).replace(r"\{layer\}", r"\d+")
        matches = [f for f in others if re.fullmatch(rf"(?:.+\.)?{pattern}", f.stem)]
        if not matches or (_textual(finding) and all(not _textual(f) for f in matches)):
            return start
    return 0


def as_toml(tables: dict[str, Any], comment: str) -> str:
    """A family's tables as text."""
    lines = [f"# {comment}", f"model_types = {_list(tables['model_types'])}"]
    lines += ["by_names = false"] if tables.get("by_names") is False else []
    lines += ["gaps = true  # some layers have no attention of this kind"] if tables.get("gaps") else []
    for entry in tables["attention"]:
        lines += ["", "[[attention]]"]
        keys = sorted((k for k in entry if k != "names"), key=lambda k: ORDER.index(k) if k in ORDER else len(ORDER))
        lines += [f"{key} = {_literal(entry[key])}" for key in keys]
        lines += ["[attention.names]"]
        lines += [f'{role} = "{entry["names"][role]}"' for role in ROLES if role in entry["names"]]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_literal(item)}" for key, item in value.items()) + " }"
    return _list(value) if isinstance(value, list) else f'"{value}"' if isinstance(value, str) else repr(value)


def _list(values: list[str]) -> str:
    return "[" + ", ".join(f'"{value}"' for value in values) + "]"
