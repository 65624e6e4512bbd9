"""What a config says about positions and scale: rotary frequencies, additive biases, and the factor of the score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keyquery.checkpoints.family import Attention
from keyquery.forms import Rope

Config = Mapping[str, Any]


def scale_of(attention: Attention, config: Config, layer: int, head_dim: int, heads: int = 1) -> float:
    """The factor by which the model multiplies q·k."""
    match attention.scale:
        case "one":
            return 1.0
        case "width":  # of all heads together
            return float(heads * head_dim) ** -0.5
        case "softplus":  # keys are multiplied by what a factor of 1 is before a softplus, as in Gemma 4's audio
            return head_dim**-0.5 * math.log1p(math.e) / math.log(2)
        case "half head_dim":
            return (head_dim / 2) ** -0.5
        case key if " " in key:  # "root KEY": 1/√value; "times KEY": the value; "scaled KEY": the value/√r
            how, key = key.split(" ", 1)
            value = float(config[key])
            return {"times": value, "root": value**-0.5, "scaled": value * head_dim**-0.5}[how]
        case "query_pre_attn_scalar":
            return float(config.get("query_pre_attn_scalar", head_dim)) ** -0.5
        case "gpt2":
            scale = head_dim**-0.5 if config.get("scale_attn_weights", True) else 1.0
            return scale / (layer + 1) if config.get("scale_attn_by_inverse_layer_idx") else scale
        case "transformer_lens":
            scale = 1 / float(config.get("attn_scale") or head_dim**0.5) if config.get("use_attn_scale", True) else 1.0
            return scale / (layer + 1) if config.get("scale_attn_by_inverse_layer_idx") else scale
        case "mpt":
            stated = (config.get("attn_config") or {}).get("softmax_scale")
            return head_dim**-0.5 if stated is None else float(stated)
        case "deberta":
            terms = config.get("pos_att_type") or []
            return (head_dim * (1 + ("c2p" in terms) + ("p2c" in terms))) ** -0.5
        case "latent":
            rope = _rope_parameters(config, layer)
            all_dim = rope.get("mscale_all_dim", 0)
            mscale = _yarn_mscale(rope["factor"], all_dim) if all_dim and "factor" in rope else 1.0
            return head_dim**-0.5 * mscale**2
        case _:
            multiplier = config.get("attention_multiplier")  # Granite's
            return head_dim**-0.5 if multiplier is None else float(multiplier)


def is_causal(attention: Attention, config: Config) -> bool:
    """Whether queries see no later keys."""
    if attention.causal == "always":
        return True
    if attention.causal == "context":
        return not context_of(config)[1]
    said = config.get(attention.causal) if isinstance(attention.causal, str) else attention.causal
    return bool(said) and config.get("use_bidirectional_attention") is not True


def context_of(config: Config) -> tuple[int, int]:
    """How many keys a query of Gemma's audio towers sees before itself, and behind."""
    left, right = (
        int(config.get(f"attention_context_{side}", config.get(f"conf_attention_context_{side}", default)))
        for side, default in (("left", 13), ("right", 0))
    )
    if right:
        raise ValueError(f"a context of {right} keys on the right beside {left} on the left is not read")
    return left - 1, right


def window_of(attention: Attention, config: Config, layer: int) -> int | None:
    """How far a layer sees: keys less than so many tokens away, or None where it sees all."""
    causal = is_causal(attention, config)
    if attention.kind == "cross" and not causal:
        return None
    size = config.get("sliding_window") or config.get("attention_window_size")
    if config.get("local_attention"):  # ModernBERT's counts both sides
        size = int(size or config["local_attention"] // 2) + (not causal)
    elif size and not causal and config.get("use_bidirectional_attention") is True:  # likewise
        size = int(size) // 2 + 1
    elif size and attention.window == "both sides":
        size = int(size) + 1
    elif size and attention.window == "halves":
        size = int(size) // 2 + 1
    kind = _kind_of(config, layer)
    if kind is not None and attention.window != "all":
        local = kind == "sliding_attention"
    else:
        match attention.window:
            case "all" | "both sides":
                local = True
            case "some":
                local = bool(config.get("use_sliding_window")) and layer >= int(config.get("max_window_layers") or 0)
            case "alternate":
                local = layer % 2 == 0
            case "pattern":
                local = (layer + 1) % int(config.get("sliding_window_pattern") or 6) != 0
            case "but every":
                local = layer % int(config.get("global_attn_every_n_layers") or 3) != 0
            case "band":  # Longformer's counts both sides
                sizes, local = config.get("attention_window"), True
                size = int(sizes[layer] if isinstance(sizes, list) else sizes or 512) // 2 + 1
            case "context" | "context but last":  # Gemma 4's sees one key less than Gemma 3n's
                size, local = context_of(config)[0] + (attention.window == "context"), True
            case "radius":
                size, local = int(config.get("local_radius") or 127) + 1, True
            case "listed":
                size, kinds = config.get("window_size") or 256, config.get("attention_layers") or []
                local = layer < len(kinds) and kinds[layer] == "local"
            case _:
                local = False
    return int(size) if local and size else None


def _kind_of(config: Config, layer: int) -> str | None:
    """What the config's `layer_types` says of a layer, if it has them."""
    kinds = config.get("layer_types")
    if not kinds:
        return None
    if not isinstance(kinds, list) or len(kinds) <= layer:
        raise ValueError(f"the config's layer_types must name every layer, got {kinds!r}, which has no layer {layer}")
    return str(kinds[layer])


def rope_of(attention: Attention, config: Config, layer: int, head_dim: int) -> Rope | None:
    """The rotation of queries and keys; None where there is none, or where no config says which."""
    if not is_rotated(attention, config, layer):
        return None
    if attention.rope_kinds and (kind := _kind_of(config, layer)) not in attention.rope_kinds:
        if kind is None:
            raise ValueError("the config has no layer_types, which say what layers have rotary positions")
        return None
    try:
        return _rope(attention, config, layer, head_dim)
    except KeyError as error:
        raise ValueError(f"the config's rotary positions lack {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"the config's rotary positions cannot be read: {error}") from None


def is_rotated(attention: Attention, config: Config, layer: int) -> bool:
    """Whether a layer is one with rotary positions that are read."""
    turned, every = config.get("no_rope_layers"), config.get("no_rope_layer_interval")  # a list has 0 for one without
    without = config.get("rope") is False or bool(attention.alibi and config.get(attention.alibi))
    if turned:
        without |= layer < len(turned) and not turned[layer]
    elif every:
        without |= (layer + 1) % int(every) == 0
    return not (attention.rope in (None, "unread") or attention.axes or not config or without)


def context_limit(attention: Attention, config: Config, layer: int, rope: Rope | None) -> int | None:
    """How many positions scores are read for, where the model scales later ones in another way; None: all."""
    limits = []
    if rope is not None and "frequencies" not in attention.names[0]:
        parameters = _rope_parameters(config, layer)
        grown = parameters["rope_type"] == "dynamic" and not (attention.rope_alpha and parameters.get("alpha"))
        limits += [config.get("max_position_embeddings")] if grown else []
        longer = parameters["rope_type"] in ("longrope", "su") and parameters.get("long_factor")
        if longer or parameters.get("llama_4_scaling_beta"):
            limits += [parameters.get("original_max_position_embeddings")]
    elif config.get("attn_temperature_tuning") and config.get("floor_scale"):
        limits += [int(config["floor_scale"]) - 1]
    return min((int(limit) for limit in limits if limit), default=None)


def chunk_of(attention: Attention, config: Config, layer: int) -> int | None:
    """The size of the chunks whose tokens see each other alone; None where a layer has none."""
    size = config.get(attention.chunk) if attention.chunk else None
    return int(size) if size and _kind_of(config, layer) == "chunked_attention" else None


def _rope(attention: Attention, config: Config, layer: int, head_dim: int) -> Rope:
    parameters = _rope_parameters(config, layer)
    shares = (parameters.get("partial_rotary_factor"), config.get("partial_rotary_factor"), config.get("rotary_pct"))
    whole = parameters["rope_type"] == "proportional"  # all pairs are listed, and some do not turn
    share = next((share for share in shares if share), 1.0)
    named = attention.rotary_dim
    stated = int(named) if named.isdecimal() else None if shares[0] else config.get(named)
    dims = head_dim if whole or attention.order == "latent" else int(stated or head_dim * share)
    if not 0 <= dims <= head_dim:
        raise ValueError(f"they turn {dims} dimensions, and a head has {head_dim}")
    interleaved = attention.rope == "interleaved" and config.get("rope_interleave", True)
    base = float(parameters["rope_theta"])
    if attention.rope_alpha and parameters["rope_type"] == "dynamic" and parameters.get("alpha"):
        base *= float(parameters["alpha"]) ** (dims / (dims - 2))
    frequencies = base ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    if whole:
        frequencies[int(share * head_dim // 2) :] = 0
    frequencies, factor = _rescaled(frequencies, base, parameters, config)
    if attention.rope_factor and parameters.get(attention.rope_factor) and parameters["rope_type"] != "default":
        factor = float(parameters[attention.rope_factor])
    return Rope(2 * len(frequencies), base, interleaved, -frequencies if attention.rope_back else frequencies, factor)


def rope_base(config: Config, layer: int) -> float:
    """The base of the rotary frequencies."""
    return float(_rope_parameters(config, layer)["rope_theta"])


def _rope_parameters(config: Config, layer: int) -> dict[str, Any]:
    """One layer's rotary parameters, from the new or the old places in a config; the old scaling comes first."""
    said = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(said, Mapping):
        raise ValueError(f"they must be an object, got {said!r:.60}")
    base = config.get("rope_theta") or config.get("global_rope_theta") or config.get("rotary_emb_base") or 10000.0
    kind = _kind_of(config, layer)
    if {"main", "compress"} <= set(said):  # DeepSeek V4's
        kind = "main" if kind == "sliding_attention" else "compress"
    if kind is not None and kind in said:
        parameters = {key: value for key, value in (said[kind] or {}).items() if key != "truncate"}  # not used there
    elif (local := _old_local_base(config, layer, kind)) is not None:
        return {"rope_type": "default", "rope_theta": local}
    else:
        parameters = dict(said)
        if (original := config.get("original_max_position_embeddings")) is not None:
            parameters["original_max_position_embeddings"] = original  # what stands outside counts
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    if parameters["rope_type"] in ("llama3", "yarn", "longrope", "su") and "max_position_embeddings" in config:
        parameters.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return {"rope_theta": base, **parameters}


def _old_local_base(config: Config, layer: int, kind: str | None) -> float | None:
    """The base of a local layer as configs said it before they had `rope_parameters`."""
    for base, every, first in (
        ("local_rope_theta", "global_attn_every_n_layers", 0),
        ("rope_local_base_freq", "sliding_window_pattern", 1),
    ):
        local = kind == "sliding_attention" if kind else (layer + first) % int(config.get(every) or 6)
        if config.get(base) and local:
            return float(config[base])
    return None


def _rescaled(
    frequencies: Float[Tensor, " pairs"], base: float, parameters: Config, config: Config
) -> tuple[Float[Tensor, " pairs"], float]:
    """Frequencies stretched for long contexts, and the factor on cosine and sine that goes with that."""
    match parameters["rope_type"]:
        case "linear":
            return frequencies / float(parameters["factor"]), 1.0
        case "proportional":
            return frequencies / float(parameters.get("factor") or 1), 1.0
        case "llama3":
            return _llama3(frequencies, float(parameters["factor"]), parameters), 1.0
        case "yarn":
            return _yarn(frequencies, base, parameters, config)
        case "longrope" | "su":
            return _longrope(frequencies, parameters, config)
        case _:
            return frequencies, 1.0


def _llama3(frequencies: Tensor, factor: float, parameters: Config) -> Tensor:
    length = parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = length * frequencies / (2 * math.pi)
    # Fast pairs keep their frequency, slow ones are stretched, those between are blended.
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor


def _yarn(frequencies: Tensor, base: float, parameters: Config, config: Config) -> tuple[Tensor, float]:
    length = parameters["original_max_position_embeddings"]
    factor = float(parameters.get("factor") or config["max_position_embeddings"] / length)
    dims = 2 * len(frequencies)

    def pair_of(turns: float) -> float:
        return dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(parameters.get("beta_fast") or 32), pair_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    stretched = ((torch.arange(len(frequencies)) - low) / max(high - low, 0.001)).clamp(0, 1).double()
    mixed = stretched * frequencies / factor + (1 - stretched) * frequencies
    if parameters.get("attention_factor") is not None:
        return mixed, float(parameters["attention_factor"])
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        ratio = _yarn_mscale(factor, parameters["mscale"]) / _yarn_mscale(factor, parameters["mscale_all_dim"])
        return mixed, ratio
    return mixed, _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(frequencies: Tensor, parameters: Config, config: Config) -> tuple[Tensor, float]:
    """Within the original context the short factors count; they are what a short text meets."""
    short = torch.tensor(parameters["short_factor"], dtype=torch.float64)
    if len(short) != len(frequencies):
        raise ValueError(f"short_factor must have {len(frequencies)} values, got {len(short)}")
    if parameters.get("attention_factor") is not None:
        return frequencies / short, float(parameters["attention_factor"])
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or config["max_position_embeddings"] / original
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return frequencies / short, grown


def alibi(heads: int, offsets: Int[Tensor, " n"]) -> Float[Tensor, "heads n"]:
    """ALiBi: slope·(key position − query position), one slope per head, 2^(−8h/heads) for a power of two."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float64)[:, None] * offsets


def t5_bias(
    table: Float[Tensor, "buckets heads"], offsets: Int[Tensor, " n"], causal: bool, config: Config
) -> Float[Tensor, "heads n"]:
    """T5's bias by bucketed offset: small offsets one by one, larger ones by logarithm, up to a distance."""
    buckets, furthest = len(table), int(config.get("relative_attention_max_distance") or 128)
    if causal:
        side, distance = torch.zeros_like(offsets), (-offsets).clamp(min=0)
    else:
        buckets //= 2
        side, distance = (offsets > 0).long() * buckets, offsets.abs()
    exact = buckets // 2
    far = torch.log(distance.clamp(min=1) / exact) / math.log(furthest / exact) * (buckets - exact)
    bucket = torch.where(distance < exact, distance, (exact + far.long()).clamp(max=buckets - 1))
    return table.double()[side + bucket].mT


def clipped_bias(table: Float[Tensor, "offsets heads"], offsets: Int[Tensor, " n"]) -> Float[Tensor, "heads n"]:
    """A bias for each offset, up to a furthest one on either side."""
    furthest = len(table) // 2
    return table.double()[offsets.clamp(-furthest, furthest - 1) + furthest].mT
