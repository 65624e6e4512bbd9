"""Attention modules that the tensor names of a file show, and that its architecture does not read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Any

from keyquery.checkpoints.locations import Location, module_name, natural
from keyquery.support.printable import NAME, printable

QUERIES = {"q", "query", "wq", "q_proj", "to_q", "q_lin", "query_proj", "linear_q", "c_q", "query_projection"}
QUERIES.add("q_a_proj")  # of a latent, as the next one is
KEYS = {"k", "key", "wk", "k_proj", "to_k", "k_lin", "key_proj", "linear_k", "c_k", "key_projection"}
KEYS.add("kv_a_proj_with_mqa")
FUSED = {"qkv", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "in_proj_weight", "attn_qkv", "qkv_linear"}
FUSED.add("linear_qkv")  # Megatron's
# Modules whose queries and keys meet in no softmax.
LINEAR = re.compile(r"linear_attn|mamba|mixer|delta_net|rwkv|linear_attention|retention")
# What layers without a softmax over queries and keys are, by their tensor names; the first that fits.
FORMLESS = {
    r"f_a_proj|\bkda\b": "Kimi delta attention",
    "linear_attn|delta_net": "gated delta net",
    "slope_rate|output_gate": "lightning attention",
    "A_log|mamba": "Mamba",
    "rg_lru|recurrent": "RG-LRU",
    "conv": "convolution",
    "mlp|up_proj|feed_forward|expert": "MLP",
}
SHOWN = 4
# Words in the names of attention modules, and of tensors that meet queries or keys.
ATTENTION = re.compile(r"attn|attention|^self$|mha|^q|^k|query|key|rel|pos|scal|temperature|bias|norm", re.IGNORECASE)
# What files hold of attention beside its parameters: frequencies and masks that configs state, scales of caches.
BUFFER = re.compile(
    r"(?:.*\.)?(?:inv_freq|original_inv_freq|masked_bias|(?:cos|sin)_cached|position_ids|[kvq]_scale|\w*_scale_inv)"
)
# Endings of weights that are stored packed or scaled.
PACKED = re.compile(
    r"(?:qweight|qzeros|scales|g_idx|weight_(?:scale|packed|shape|zero_point|g_idx|global_scale)\w*|input_scale|input_global_scale"
    r"|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)|SCB|weight_format)$"
)


def uncovered(
    shapes: Mapping[str, Any],
    locations: Iterable[Location],
    config: Mapping[str, Any] | None = None,
    formless: str | None = None,
) -> list[str]:
    """Modules with query and key weights, or fused ones, that belong to none of the places.

    Layers that the config calls linear attention, and modules with the pattern `formless` in their names, have no
    softmax over queries and keys.
    """
    kinds = (config or {}).get("layer_types")
    linear_layers = [n for n, kind in enumerate(kinds) if kind == "linear_attention"] if isinstance(kinds, list) else []
    leaves: dict[str, set[str]] = {}
    for name in shapes:
        stem = name.removesuffix(".weight")
        module, _, leaf = stem.removesuffix(".linear").rpartition(".")  # Gemma 4's are inside of what clips
        weight = leaf in QUERIES | KEYS | FUSED and (stem != name or leaf == "in_proj_weight")
        linear = bool(LINEAR.search(module)) or f"{module}.A_log" in shapes  # a decay of states, and no softmax
        linear = linear or (formless is not None and re.search(formless, name) is not None)
        if weight and not linear and len(shapes[name]) == 2:  # shapes of other tensors may be unknown
            leaves.setdefault(module, set()).add(leaf)
    shown = {module for module, parts in leaves.items() if (parts & QUERIES and parts & KEYS) or parts & FUSED}
    read = {name for location in locations for name in location.names.values()}
    covered = {module for module in shown if any(f"{name}.".startswith(f"{module}.") for name in read)}
    left = (
        m
        for m in shown - covered
        if not any(m.startswith(f"layers.{n}.") or f".layers.{n}." in m for n in linear_layers)
    )
    return sorted(left, key=natural)


def unread_tensors(
    shapes: Mapping[str, Any], located: Iterable[Location], harmless: Container[str] = frozenset()
) -> list[str]:
    """Tensors inside of attention modules that no role reads, but for those that are known to be of no score."""
    roles: dict[str, set[str]] = {}
    for location in located:
        roles.setdefault(f"{module_name(location)}.", set()).update(filter(None, location.names.values()))
    inside: list[str] = []
    for name in shapes:
        stem = name.rpartition(".")[0]
        for module in (f"{name[:end]}." for end, letter in enumerate(name) if letter == "."):
            if module in roles and not {name, stem, name.rpartition("_")[0]} & roles[module]:
                rest = general(name.removeprefix(module))
                looks = ATTENTION.search(module.split(".")[-2]) or ATTENTION.search(rest.partition(".")[0])
                if looks and rest not in harmless and not BUFFER.fullmatch(rest) and not _is_mask(rest, shapes, name):
                    inside.append(name)
    return sorted(inside, key=natural)


def general(name: str) -> str:
    """A tensor's name with # for its numbers, and as its plain weight where it is stored in another way."""
    return re.sub(r"\d+", "#", PACKED.sub("weight", name))


def _is_mask(leaf: str, shapes: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor is a causal mask, as GPT-2's files hold it."""
    return leaf == "bias" and len(shapes[name]) == 4 and tuple(shapes[name][:2]) == (1, 1)


def formless(tensors: Iterable[str], locations: Iterable[Location]) -> tuple[str, ...]:
    """Notes on the layers of each stack that have no QK form, such as those of a Mamba hybrid."""
    stacks: dict[str, set[int]] = {}
    for location in locations:
        for name in location.names.values():
            before, number, _ = name.partition(f".{location.layer}.")
            nested = sum(part.isdecimal() for part in name.split(".")) > 1  # stages of blocks, as in Swin
            if number and not nested:
                stacks.setdefault(f"{before}.", set()).add(location.layer)
    notes = []
    for stack, numbers in stacks.items():
        layers: dict[int, list[str]] = {}
        for tensor in tensors:
            number, _, rest = tensor.removeprefix(stack).partition(".")
            if tensor.startswith(stack) and number.isdecimal():
                layers.setdefault(int(number), []).append(rest)
        kinds = Counter(_formless_kind(names) for layer, names in layers.items() if layer not in numbers)
        if set(kinds) - {"MLP", "attention of another kind"}:  # those alone may be layers that were swapped
            verb = "have" if kinds.total() > 1 else "has"
            words = [kind if len(kinds) == 1 else f"{count} {kind}" for kind, count in kinds.most_common()]
            notes.append(f"{kinds.total()} of {len(layers)} layers {verb} no QK form: {', '.join(words)}")
    return tuple(dict.fromkeys(notes))


def _formless_kind(names: Iterable[str]) -> str:
    text = " ".join(names)
    return next((kind for pattern, kind in FORMLESS.items() if re.search(pattern, text)), "attention of another kind")


def listed(modules: list[str]) -> str:
    """Modules by name, those that differ in their numbers once."""
    kinds: dict[str, list[str]] = {}
    for module in modules:
        kinds.setdefault(re.sub(r"\d+", "…", module), []).append(module)
    names = [
        alike[0] + (f" and {len(alike) - 1} more of its kind" if len(alike) > 1 else "") for alike in kinds.values()
    ]
    more = f", … ({len(names)} kinds in all)" if len(names) > SHOWN else ""
    return ", ".join(printable(name, NAME) for name in names[:SHOWN]) + more
