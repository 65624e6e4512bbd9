"""GGUF's metadata and tensor names in the words of a config.json and of a Llama file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from keyquery.support.printable import NAME, printable

# The roles of a block's tensors by their names in gguf's tables (MODEL_TENSOR), and the modules of a Llama file.
BLOCK = {
    "ATTN_Q": "self_attn.q_proj",
    "ATTN_K": "self_attn.k_proj",
    "ATTN_V": "self_attn.v_proj",
    "ATTN_QKV": "self_attn.qkv_proj",
    "ATTN_OUT": "self_attn.o_proj",
    "ATTN_NORM": "input_layernorm",
    "ATTN_NORM_2": "attention_layernorm",
    "ATTN_Q_NORM": "self_attn.q_norm",
    "ATTN_K_NORM": "self_attn.k_norm",
    "LAYER_OUT_NORM": "output_layernorm",
    "ATTN_Q_A": "self_attn.q_a_proj",
    "ATTN_Q_A_NORM": "self_attn.q_a_layernorm",
    "ATTN_Q_B": "self_attn.q_b_proj",
    "ATTN_KV_A_MQA": "self_attn.kv_a_proj_with_mqa",
    "ATTN_KV_A_NORM": "self_attn.kv_a_layernorm",
    "ATTN_KV_B": "self_attn.kv_b_proj",
    "ATTN_K_B": "self_attn.k_b_proj",
}
REST = {"TOKEN_EMBD": "embed_tokens", "TOKEN_EMBD_NORM": "embed_norm"}
WINDOWED = re.compile(r"not first of (\d+)")


@cache
def architectures() -> dict[str, dict[str, Any]]:
    """What is built into the runtime of each supported architecture."""
    file = files("keyquery.checkpoints.formats").joinpath("gguf_architectures.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def plain_names(library: Any) -> dict[str, str]:
    """Modules of a Llama file by gguf's own names, with {bid} for the number of a block."""
    kinds, names = library.MODEL_TENSOR, library.TENSOR_NAMES
    block = {names[kinds[kind]]: f"layers.{{bid}}.{module}" for kind, module in BLOCK.items()}
    return block | {names[kinds[kind]]: module for kind, module in REST.items()}


def plain_name(name: str, table: Mapping[str, str]) -> str:
    """A tensor's name as a Llama file has it; others stay as they are."""
    module, _, ending = name.rpartition(".")
    parts = module.split(".")
    number = parts[1] if len(parts) == 3 and parts[0] == "blk" else ""
    known = table.get(f"blk.{{bid}}.{parts[2]}" if number else module)
    return name if known is None else f"{known.format(bid=number)}.{ending}"


class Metadata:
    """The fields of a file by the keys of gguf's tables."""

    def __init__(self, fields: Mapping[str, Any], library: Any) -> None:
        self.fields, self.keys = fields, library.Keys
        self.architecture = fields.get("general.architecture", "")

    def of(self, section: str, key: str) -> Any:
        """The value of a key, such as HEAD_COUNT of Attention; None if the file does not state it."""
        name = getattr(getattr(self.keys, section), key)
        return self.fields.get(name.format(arch=self.architecture))

    def number(self, section: str, key: str) -> int | None:
        """An integer of a model whose layers are all alike; raises for one that differs from layer to layer."""
        value = self.of(section, key)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            return int(value[0])
        if isinstance(value, list):
            name = getattr(getattr(self.keys, section), key).format(arch=self.architecture)
            raise ValueError(f"its {printable(name, NAME)} differs from layer to layer, which is not read")
        return value


def config_of(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], library: Any) -> dict[str, Any]:
    """GGUF's metadata in the words of a config.json; `shapes` by plain name. A layer has a tensor at least."""
    stated = Metadata(fields, library)
    facts = _facts(stated.architecture)
    heads, layers = stated.number("Attention", "HEAD_COUNT"), stated.of("LLM", "BLOCK_COUNT")
    width, norm = stated.of("LLM", "EMBEDDING_LENGTH"), facts.get("norm", "rms")
    if isinstance(layers, int) and not 0 <= layers <= len(shapes):
        raise ValueError(f"its metadata say {layers} layers, and it holds {len(shapes)} tensors")
    _require_supported(stated, shapes)
    causal = stated.of("Attention", "CAUSAL")
    config = {
        "model_type": f"gguf-{stated.architecture}",
        "norm_kind": norm,
        "post_norm": facts.get("post", False),
        "alibi": facts.get("alibi", False),
        "latent": stated.of("Attention", "KV_LORA_RANK") is not None,
        "causal": facts.get("causal", True) if causal is None else causal,
        "max_position_embeddings": stated.of("LLM", "CONTEXT_LENGTH"),
        f"{norm}_norm_eps": stated.of("Attention", "LAYERNORM_RMS_EPS" if norm == "rms" else "LAYERNORM_EPS"),
        "query_pre_attn_scalar": _scalar(stated, facts, width, heads, layers),
        "num_attention_heads": heads,
        "num_key_value_heads": stated.number("Attention", "HEAD_COUNT_KV"),
        "head_dim": stated.of("Attention", "KEY_LENGTH"),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "temperature_length": stated.of("Attention", "TEMPERATURE_LENGTH"),
        **_rope(stated, facts),
        **(_windows(stated, facts, layers) if isinstance(layers, int) else {}),
    }
    config |= _latent(stated) if config["latent"] else {}
    return {key: value for key, value in config.items() if value is not None}


def _facts(architecture: Any) -> dict[str, Any]:
    known = architectures()
    if architecture not in known:
        raise ValueError(
            f"its architecture is {printable(repr(architecture), NAME)}, which is not supported; supported: "
            f"{', '.join(known)}"
        )
    return known[architecture]


def _require_supported(stated: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise for what changes scores and is not read."""
    for name, shape in shapes.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")) and len(shape) > 1:
            raise ValueError(f"{name} has the shape {shape}: a QK-norm with gains per head is not read")
    if clamp := stated.of("Attention", "CLAMP_KQV"):
        raise ValueError(f"its queries and keys are clamped at {clamp:g}, which is not read")


def _scalar(stated: Metadata, facts: Mapping[str, Any], width: Any, heads: Any, layers: Any) -> float | None:
    """The number whose inverse root scales scores, where that is not the head width."""
    scale = stated.of("Attention", "SCALE")
    if scale:
        return float(scale) ** -2
    return width / heads if layers in facts.get("by_width", []) else None


def _rope(stated: Metadata, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Bases, pairs and scaling of RoPE."""
    if facts["rope"] == "none":
        return {"rope": False}
    base = stated.of("Rope", "FREQ_BASE")
    local = stated.of("Rope", "FREQ_BASE_SWA") or facts.get("local")
    config = {
        "rope_theta": base,
        "rotary_dim": stated.of("Rope", "DIMENSION_COUNT"),
        "rope_interleave": facts["rope"] == "norm",
        "local_rope_theta": base if local == "same" else local,
    }
    kind = stated.of("Rope", "SCALING_TYPE")
    if not kind or kind == "none":
        return config
    scaling = {
        "rope_type": kind,
        "factor": stated.of("Rope", "SCALING_FACTOR"),
        "original_max_position_embeddings": stated.of("Rope", "SCALING_ORIG_CTX_LEN"),
        "beta_fast": stated.of("Rope", "SCALING_YARN_BETA_FAST"),
        "beta_slow": stated.of("Rope", "SCALING_YARN_BETA_SLOW"),
        "truncate": facts.get("exact", True),
    }
    if kind == "yarn" and (multiplier := stated.of("Rope", "SCALING_YARN_LOG_MUL")):
        scaling |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}  # stored as a tenth
    return {**config, "rope_scaling": {key: value for key, value in scaling.items() if value is not None}}


def _windows(stated: Metadata, facts: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The sliding window, its layers, and those without RoPE."""
    size = stated.of("Attention", "SLIDING_WINDOW")
    local = _local(stated.of("Attention", "SLIDING_WINDOW_PATTERN"), facts.get("window"), layers) if size else None
    config: dict[str, Any] = {}
    if local is not None:
        key = "local_attention" if facts.get("both") else "sliding_window"
        config = {key: size, "layer_types": ["sliding_attention" if one else "full_attention" for one in local]}
    every = facts.get("no_rope")
    if every == "global" and local is not None:
        config["no_rope_layers"] = [int(one) for one in local]
    elif isinstance(every, int):
        config["no_rope_layers"] = [int((layer + 1) % every != 0) for layer in range(layers)]
    return config


def _local(pattern: Any, built_in: Any, layers: int) -> list[bool] | None:
    """Which layers have the window: as the file lists them, else as the runtime has it."""
    if isinstance(pattern, list) and len(pattern) == layers:
        return [bool(one) for one in pattern]
    if built_in is None:
        return None
    if built_in == "all":
        return [True] * layers
    if isinstance(built_in, str) and (match := WINDOWED.fullmatch(built_in)):
        return [layer % int(match[1]) != 0 for layer in range(layers)]
    every = pattern if isinstance(pattern, int) and pattern > 0 else built_in
    return [layer % every != every - 1 for layer in range(layers)]


def _latent(stated: Metadata) -> dict[str, Any]:
    """Sizes of multi-head latent attention."""
    rank, rotary = stated.of("Attention", "KV_LORA_RANK"), stated.of("Rope", "DIMENSION_COUNT")
    whole = stated.of("Attention", "KEY_LENGTH_MLA") or stated.of("Attention", "KEY_LENGTH")
    if not all(isinstance(size, int) for size in (rank, rotary, whole)) or whole < rotary:
        raise ValueError("its metadata must state kv_lora_rank, rope.dimension_count and key_length_mla")
    sizes = {"kv_lora_rank": rank, "qk_rope_head_dim": rotary, "qk_nope_head_dim": whole - rotary}
    return {**sizes, "head_dim": whole, "rotary_dim": rotary}
