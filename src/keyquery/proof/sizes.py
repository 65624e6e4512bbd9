"""Small configs of any model type: all widths divided by one factor, so that their relations stay as they were."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

HEADS = re.compile(r".*(?:^|_)n?_?heads?(?:_per_stage)?$|n_head_kv|num_key_value_heads|attention_heads")
HEAD_DIM = re.compile(
    r".*(?:head_dim|dim_head|d_kv|kv_channels|head_size|rotary_dim|size_per_head|dim_per_head|d_head)$"
    r"|(?:mrope|rope)_(?:section|dim.*)|axes_dim"
)
LAYERS = re.compile(
    r".*(?:^|_)(?:num_hidden_layers|num_layers|n_layers?|layers|depths?|num_\w*_layers|num_blocks|blocks_per_stage"
    r"|\w*_num_layers|num_hidden_groups|resampler_depth)$"
)
NOT_LAYERS = re.compile(
    r".*(?:feat_extract|residual_layers|max_depth|min_depth|max_window|mlp_only|skip|shared_layers|iou_head|no_rope"
    r"|conv_layers|lstm|proj_layers|norm_layers|adapter_layers|num_nextn|cross_attention_layers|kv_from|fuser)"
)
EVERY = re.compile(r".*(?:_period|_interval|_every_n\w*|every_n_layers|_frequency|sliding_window_pattern|_step)$")
WIDTH = re.compile(
    r".*(?:hidden|dim|embed|d_model|n_embd|width|channels|ffn|inter|latent|rank|d_ff|d_inner|mlp|proj|units|_size"
    r"|filters|fpn|feats)"
)
NOT_WIDTH = re.compile(
    r".*(?:vocab|image|patch|window|kernel|bucket|position|^max|token|batch|chunk|block_size|codebook_size|ratio|mult"
    r"|^num_(?!filters|pos_feats)|stride|crop|pool_s|act|drop|_rate|range|eps|layer_id|layers|length|factor|scale|input_size"
    r"|stage|grid|context_size|memory_size|feature_size|groups|in_channels|audio_channels|num_channels|levels|mel"
    r"|temperature|_step|norm|stem|type|merge_size|temporal|sample_size|tubelet|hidden_act|interpol|vision_feature"
    r"|backbone_feature|queue|cache|base_channels|latent_channels|in_chans|index_topk|d_state|d_conv|conv_dim_head|pretrain)"
)
EXPERTS = re.compile(r".*(?:num|n)_?(?:local|routed|moe|real)?_?experts$|moe_num_experts|num_experts")
PER_TOKEN = re.compile(r".*(?:experts_per_tok|top_?k_?experts|moe_topk|moe_k|moe_top_k|num_selected_experts)$")
TOKEN = re.compile(r".*(?:_token_id|_token_index|_token_ids|_token|^eos_id|_idx|bos_id|token_id)$")
CAPPED = {"max_position_embeddings": 512, "n_positions": 512, "max_source_positions": 64, "n_ctx": 512}
CAPPED |= {"max_target_positions": 64, "image_size": 256, "num_position_embeddings": 1024, "num_queries": 12}
CAPPED |= {"sliding_window": 5, "local_attention": 6, "attention_window_size": 5, "sliding_window_size": 5}
CAPPED |= {"attention_window": 4, "vocab_size_per_layer_input": 99, "codebook_size": 64}
CAPPED |= {"num_frames": 4, "max_2d_position_embeddings": 128, "index_topk": 16, "attention_chunk_size": 6}
CAPPED |= {"encoder_hash_byte_group_vocab": 99, "num_embeddings": 64, "base_channels": 32, "num_res_blocks": 1}
CAPPED |= {"max_text_length": 64, "expert_capacity": 32, "max_seq_length": 512, "max_seq_len": 512}
VOCAB = 99
DEEPEST = 10_000  # layers of a config


def shrink(facts: Mapping[Any, Any], factor: int) -> dict[Any, Any]:
    """A config's values with all widths divided by `factor`, few layers of every kind, few experts, a small vocabulary.

    Sub-configs are shrunk alike. The number of heads is reduced with the width where it can be.
    """
    chosen = {}
    by_heads = _fewer_heads(facts, factor)
    layers = _kept_layers(facts)
    for key, value in facts.items():
        if not isinstance(key, str):
            chosen[key] = value
        elif isinstance(value, Mapping) and _by_layer(value):
            places = {old: new for new, old in enumerate(layers[1])}
            chosen[key] = {
                places[int(index)]: shrink(part, factor) if isinstance(part, Mapping) else part
                for index, part in value.items()
                if int(index) in places
            }
        elif isinstance(value, Mapping):
            nested = not key.startswith("rope_") and "label" not in key
            chosen[key] = shrink(value, factor) if nested else _rope(value, factor // by_heads)
        else:
            chosen[key] = _value(key, value, factor, by_heads, layers)
    _completed(chosen)
    _sectioned(chosen)
    vocab = next((v for k, v in chosen.items() if "vocab_size" in str(k) and isinstance(v, int)), VOCAB)
    return _tokens(chosen, vocab if vocab > 8 else VOCAB)


def _value(key: str, value: Any, factor: int, by_heads: int, layers: tuple[int, list[int]]) -> Any:
    depth, kept = layers
    if isinstance(value, (list, tuple)):
        if len(value) == depth and depth > len(kept):
            return [value[index] for index in kept]
        if LAYERS.fullmatch(key) and not NOT_LAYERS.match(key):
            return [min(v, 2) if _count(v) else v for v in value]
        if not all(_count(v) for v in value) or not value:
            return value
        return [_value(key, v, factor, by_heads, (0, [])) for v in value]
    if not _count(value):
        return value
    if key in CAPPED:
        return min(value, CAPPED[key])
    if LAYERS.fullmatch(key) and not NOT_LAYERS.match(key):
        return len(kept) if value == depth else min(value, 2)
    if "vocab_size" in key and "type_vocab" not in key:
        return min(value, VOCAB)
    if EXPERTS.fullmatch(key):
        return min(value, 8)
    if PER_TOKEN.fullmatch(key):
        return min(value, 2)
    if HEADS.fullmatch(key):
        return max(1, value // by_heads)
    if HEAD_DIM.fullmatch(key):
        return value * by_heads // factor if value * by_heads >= factor else value
    if EVERY.fullmatch(key):
        return min(value, 2)
    if key in ("n_group", "num_expert_group", "num_expert_groups"):
        return min(value, 2)
    if key == "topk_group":
        return 1
    if key == "upsample_groups":
        return max(1, value // factor)
    if value >= 32 and WIDTH.match(key) and not NOT_WIDTH.match(key):
        return value // factor if value % factor == 0 else value
    return value


def _by_layer(value: Mapping[Any, Any]) -> bool:
    """Whether a mapping has numbers of layers as its keys, and mappings as its values."""
    return bool(value) and all(str(key).isdecimal() and isinstance(part, Mapping) for key, part in value.items())


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fewer_heads(facts: Mapping[Any, Any], factor: int) -> int:
    """By how much head counts are divided; head widths take the rest of the factor, and stay multiples of 8."""
    counts, width = _heads(facts), _head_dim(facts)
    options = [by for by in (8, 4, 2, 1) if factor % by == 0]
    for least in (16, 8, 4, 2):
        for by in options:
            if any(n % by or n // by < 2 for n in counts):
                continue
            rest = factor // by
            if width is None or (width % rest == 0 and width // rest >= least and not (width // rest) % min(least, 8)):
                return by
    return 1


def _heads(facts: Mapping[Any, Any]) -> list[int]:
    counts = []
    for key, value in facts.items():
        if (
            isinstance(key, str)
            and HEADS.fullmatch(key)
            and "key_value" not in key
            and "kv" not in key
            and "linear" not in key
        ):
            counts += [v for v in (value if isinstance(value, (list, tuple)) else [value]) if _count(v) and v > 0]
    return counts


def _head_dim(facts: Mapping[Any, Any]) -> int | None:
    for key in ("head_dim", "d_kv", "qk_rope_head_dim", "kv_channels", "attention_head_dim"):
        if _count(facts.get(key)) and facts[key]:
            return int(facts[key])
    width: Any = next((facts[k] for k in ("hidden_size", "d_model", "n_embd", "embed_dim", "dim") if k in facts), None)
    counts = _heads(facts)
    return width // max(counts) if _count(width) and counts and width % max(counts) == 0 else None


def _kept_layers(facts: Mapping[Any, Any]) -> tuple[int, list[int]]:
    """The depth of a stack, and which of its layers are kept: the first of each kind, and at least two."""
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "layers")
    depth = next((facts[name] for name in names if _count(facts.get(name))), 0)
    if depth <= 2:
        return depth, list(range(depth))
    if depth > DEEPEST:
        raise ValueError(f"a config with {depth} layers is not proven; the limit is {DEEPEST}")
    lists = [v for v in facts.values() if isinstance(v, (list, tuple)) and len(v) == depth]
    tables = [v for v in facts.values() if isinstance(v, Mapping) and _by_layer(v)]
    kinds: dict[tuple[str, ...], int] = {}
    for index in range(depth):
        layer_kinds = [str(table.get(index, table.get(str(index)))) for table in tables]
        kinds.setdefault((*layer_kinds, *(str(v[index]) for v in lists)), index)
    kept = sorted(kinds.values())
    if len(kept) > 6:  # values of their own in each layer
        kept = [0, 1, depth - 2, depth - 1]
    intervals = [v for k, v in facts.items() if EVERY.fullmatch(str(k)) and _count(v) and v > 1]
    least = 4 if intervals else 2
    rest = (index for index in range(depth) if index not in kept)
    kept += [index for index, _ in zip(rest, range(max(0, least - len(kept))), strict=False)]
    return depth, sorted(kept)


def _rope(parameters: Mapping[Any, Any], by: int) -> Any:
    """Rotary parameters of narrower heads: sections and factors by pair are thinned."""
    changed: dict[Any, Any] = {}
    for key, value in parameters.items():
        if isinstance(value, Mapping):
            changed[key] = _rope(value, by)
        elif key.endswith("_section") and isinstance(value, (list, tuple)):
            changed[key] = _section(list(value), by)
        elif key in ("short_factor", "long_factor"):
            changed[key] = list(value)[:: max(by, 1)]
        else:
            changed[key] = value
    return changed


UNSAID = {"vocab_size": VOCAB, "prediction_length": 8, "num_experts": 4, "top_k_experts": 2, "num_experts_per_tok": 2}
UNSAID |= {"moe_intermediate_size": 32}


def _completed(facts: dict[Any, Any]) -> None:
    """Give values to what is None in a default config and in no released one."""
    heads, width = facts.get("num_attention_heads"), facts.get("hidden_size")
    for key, value in UNSAID.items():
        if key in facts and facts[key] is None:
            facts[key] = value
    if "mlp_layer_types" in facts and facts["mlp_layer_types"] is None:
        facts["mlp_layer_types"] = ["sparse"] * int(facts.get("num_hidden_layers") or 0)
    if not _count(heads) or not _count(width) or not heads:
        return
    if "head_dim" in facts and facts["head_dim"] is None and width % heads == 0:
        facts["head_dim"] = width // heads
    if "num_key_value_heads" in facts and facts["num_key_value_heads"] is None:
        facts["num_key_value_heads"] = heads


# Sections of rotary pairs by axis that models have where their configs have none.
AXES = {"qwen2_vl": [16, 24, 24], "qwen2_5_vl": [16, 24, 24], "qwen2_5_omni": [16, 24, 24], "paddleocr": [16, 24, 24]}
AXES |= {"glm4v": [8, 12, 12], "glm_image": [8, 12, 12], "glm_ocr": [8, 12, 12], "ernie4_5_vl": [22, 22, 20]}


def _sectioned(facts: dict[Any, Any]) -> None:
    """Give rotary parameters the sections that their heads need."""
    kind, said = str(facts.get("model_type")), facts.get("rope_parameters")
    sizes = next((sizes for start, sizes in AXES.items() if kind.startswith(start)), None)
    width = _head_dim(facts)
    if sizes is None or width is None or not isinstance(said, Mapping) or "vision" in kind:
        return
    pairs = int(width * said.get("partial_rotary_factor", 1.0)) // 2
    if sum(said.get("mrope_section", sizes)) != pairs:
        even = pairs * 11 // 32  # the first two alike, as ERNIE needs them
        section = [even, even, pairs - 2 * even] if sizes[0] == sizes[1] else _section(sizes, sum(sizes) / pairs)
        facts["rope_parameters"] = {**said, "mrope_section": section}


def _section(sizes: list[int], by: float) -> list[int]:
    """Sizes that add up to a `by`-th of their sum, each at least 1 and nearly in proportion."""
    ends = [round(sum(sizes[:n]) / by) for n in range(len(sizes) + 1)]
    return [max(1, b - a) for a, b in pairwise(ends)]


def _tokens(facts: dict[Any, Any], vocab: int) -> dict[Any, Any]:
    """Ids of special tokens within the vocabulary, distinct where they were."""
    free = iter(range(vocab - 1, 3, -1))
    moved: dict[int, int] = {}

    def inside(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [inside(v) for v in value]
        if not _count(value) or value < vocab:
            return value
        if value not in moved:
            moved[value] = next(free, vocab - 1)
        return moved[value]

    return {key: inside(value) if TOKEN.fullmatch(str(key)) else value for key, value in facts.items()}


def nested(facts: Mapping[Any, Any]) -> Iterator[Mapping[Any, Any]]:
    """A config's values and those of its sub-configs."""
    yield facts
    for value in facts.values():
        if isinstance(value, Mapping):
            yield from nested(value)
