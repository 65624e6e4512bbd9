"""Attention modules that the tensor names of a file show, and that its architecture does not read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from keyquery.checkpoints.family import Place, natural
from keyquery.support.printable import NAME, printable

QUERIES = {
    "q",
    "query",
    "wq",
    "q_proj",
    "to_q",
    "q_lin",
    "query_proj",
    "linear_q",
    "c_q",
    "query_projection",
    "q_a_proj",
}
KEYS = {
    "k",
    "key",
    "wk",
    "k_proj",
    "to_k",
    "k_lin",
    "key_proj",
    "linear_k",
    "c_k",
    "key_projection",
    "kv_a_proj_with_mqa",
}
FUSED = {"qkv", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "in_proj_weight", "attn_qkv", "qkv_linear"}
# Modules whose queries and keys meet in no softmax.
LINEAR = re.compile(r"linear_attn|mamba|mixer|delta_net|rwkv|linear_attention|retention")
SHOWN = 4


def uncovered(shapes: Mapping[str, tuple[int, ...]], places: Iterable[Place]) -> list[str]:
    """Modules with query and key weights, or fused ones, that belong to none of the places."""
    leaves: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        stem = name.removesuffix(".weight")
        module, _, leaf = stem.rpartition(".")
        if len(shape) == 2 and (stem != name or leaf == "in_proj_weight") and not LINEAR.search(module):
            leaves.setdefault(module, set()).add(leaf)
    shown = {module for module, own in leaves.items() if (own & QUERIES and own & KEYS) or own & FUSED}
    read = {name for place in places for name in place.names.values()}
    covered = {module for module in shown if any(f"{name}.".startswith(f"{module}.") for name in read)}
    return sorted(shown - covered, key=natural)


def listed(modules: list[str]) -> str:
    """Modules by name, those that differ in their numbers once."""
    kinds: dict[str, list[str]] = {}
    for module in modules:
        kinds.setdefault(re.sub(r"\d+", "…", module), []).append(module)
    names = [
        found[0] + (f" and {len(found) - 1} more of its kind" if len(found) > 1 else "") for found in kinds.values()
    ]
    more = f", … ({len(names)} kinds in all)" if len(names) > SHOWN else ""
    return ", ".join(printable(name, NAME) for name in names[:SHOWN]) + more
