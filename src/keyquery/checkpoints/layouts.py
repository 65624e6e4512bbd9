"""From tensors to heads: query and key of every head, whichever way a file packs them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, block_diag
from torch.nn.functional import pad

from keyquery.checkpoints.family import Attention
from keyquery.checkpoints.layer import Projections
from keyquery.checkpoints.locations import Location
from keyquery.checkpoints.sources import Source
from keyquery.support.checks import check_count

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")


def count_heads(location: Location, source: Source, config: Mapping[str, Any], given: int | None) -> int:
    """The number of query heads: as the tensor, the live module or the config says; as given where none does."""
    stated = location.attention.heads
    named = [stated] if isinstance(stated, str) else list(HEADS) if stated is None else []
    said: dict[str, Any] = {"the architecture": stated if isinstance(stated, int) else None}
    if location.attention.order == "heads":
        name = location.names["query"] + location.attention.weight
        said[f"{name} of shape {source.shapes[name]}"] = source.shapes[name][0]
    if location.attention.order == "stacked":
        name = location.names["fused"] + location.attention.weight
        said[f"{name} of shape {source.shapes[name]}"] = source.shapes[name][1]
    said["the module"] = _heads_of_module(location, source)
    blocks = config.get("blocks_per_stage")
    said |= {f"the config's {name}": _of_stage(_stated(name, config), location, blocks) for name in named}
    where, count = next(((where, number) for where, number in said.items() if number is not None), ("", given))
    if count is None:
        raise ValueError(f"{source.label} does not say how many heads it has: give heads")
    check_count(where or "heads", count)
    if given is not None and given != count:
        raise ValueError(f"heads is {given}, but {where} says {count}")
    return int(count)


def _stated(name: str, config: Mapping[str, Any]) -> Any:
    """What a config says under a key; of "a / b", the quotient, at least 1; b may be a number."""
    if " / " not in name:
        return config.get(name)
    whole, part = (int(key) if key.isdecimal() else config.get(key) for key in name.split(" / "))
    return max(1, int(whole) // int(part)) if whole and part else None


def _of_stage(number: Any, location: Location, blocks: Any = None) -> Any:
    """A number of the config; of a list, that of the layer's stage, the number before its own, or of the layer.

    `blocks` are the numbers of layers of each stage, where layers are counted through all stages.
    """
    if not isinstance(number, (list, tuple)):
        return number
    if isinstance(blocks, (list, tuple)) and len(blocks) == len(number):
        return next(
            (value for value, end in zip(number, accumulate(blocks), strict=True) if location.layer < end), None
        )
    stages = [int(part) for part in location.anchor.split(".") if part.isdecimal()]
    index = stages[-2] if len(stages) > 1 else location.layer
    return number[index] if index < len(number) else None


def _heads_of_module(location: Location, source: Source) -> int | None:
    asked = getattr(source, "heads", None)
    return asked(location.names["module"]) if asked and "module" in location.names else None


def projections(location: Location, source: Source, heads: int, head_dim: int | None) -> Projections:
    """Read query and key of one layer and cut them into heads."""
    if location.attention.order in ("apart", "heads", "columns"):
        return _apart(location, source, heads)
    if location.attention.order == "stacked":
        return _stacked(location, source)
    if location.attention.order == "learned":
        return _learned(location, source, heads)
    return _fused(location, source, heads, head_dim)


def _stacked(location: Location, source: Source) -> Projections:
    name = location.names["fused"] + location.attention.weight
    if len(source.shapes[name]) != 4 or source.shapes[name][0] != 3:
        raise ValueError(f"{name} has the shape {tuple(source.shapes[name])}, expected (3, heads, r, d)")
    query, key = read_rows(source, name, 0, 2)
    return Projections(query.unsqueeze(1), key.unsqueeze(1))


def _learned(location: Location, source: Source, heads: int) -> Projections:
    """Tokens that are queries as they are, and keys of others: the query's weight is the identity, cut into heads."""
    key = read_weight(source, location.names["key"] + location.attention.weight, location.attention)
    rank = _divide(len(key), heads, f"{location.names['key']}: {len(key)} rows are not {heads} heads of equal width")
    identity = torch.eye(len(key), dtype=key.dtype).reshape(heads, 1, rank, -1)
    return Projections(
        identity, key.reshape(heads, 1, rank, -1), None, _bias(source, location, "key", (heads, 1, rank))
    )


@dataclass(frozen=True, eq=False)
class Values:
    """What the heads of one layer carry, and how that is written: W_V, and W_Oᵀ cut into heads, with their biases."""

    value: Float[Tensor, "groups 1 r d"]
    output: Float[Tensor, "groups shared r width"]
    value_bias: Float[Tensor, "groups 1 r"] | None = None
    output_bias: Float[Tensor, " width"] | None = None


def values(location: Location, source: Source, groups: int, shared: int, rank: int) -> Values:
    """Read value and output of one layer; rows of W_Oᵀ are a head's own outputs."""
    attention, names = location.attention, location.names
    carrier = "value" if "value" in names else "fused"
    value = _last(read_weight(source, names[carrier] + attention.weight, attention), location, groups, shared, rank)
    bias = names["packed_bias"] + attention.bias if "packed_bias" in names else location.bias(carrier)
    out_bias = location.bias("output")
    return Values(
        value,
        _output(location, source).reshape(groups, shared, rank, -1),
        _last(read_rows(source, bias).flatten(), location, groups, shared, rank) if bias in source.shapes else None,
        read_rows(source, out_bias) if out_bias in source.shapes else None,
    )


def _output(location: Location, source: Source) -> Tensor:
    """W_Oᵀ, (heads·r, width)."""
    name = location.names["output"] + location.attention.output_weight
    if location.attention.order == "columns":  # (width, heads, r)
        return read_rows(source, name).flatten(1).mT
    if location.attention.order == "heads":  # (heads, r, width)
        return read_rows(source, name).flatten(0, 1)
    return read_weight(source, name, location.attention).mT


def _last(packed: Tensor, location: Location, groups: int, shared: int, rank: int) -> Tensor:
    """The values among rows: they stand behind queries and keys, of all heads or of each group."""
    rest = packed.shape[1:]
    if location.attention.order == "groups":
        packed = packed.reshape(groups, shared + 2, rank, *rest)[:, -1].flatten(0, 1)
    elif location.attention.order == "quarters":
        packed = packed.reshape(4, 3, -1, *rest)[:, 1].flatten(0, 1)
    return packed[-groups * rank :].reshape(groups, 1, rank, *rest)


def read_rows(source: Source, name: str, start: int = 0, stop: int | None = None) -> Tensor:
    """Rows of a tensor that must be of floating point and at least 16 bits."""
    rows = source.rows(name, start, stop)
    if not rows.is_floating_point() or rows.dtype.itemsize < 2:
        kind, module = str(rows.dtype).removeprefix("torch."), name.removesuffix(".weight")
        raise ValueError(
            f"{name} is stored as {kind} without scales, which is not read: expected {module}.weight_scale, or another "
            "format that docs/checkpoints.md lists"
        )
    return rows


def read_weight(source: Source, name: str, attention: Attention, start: int = 0, stop: int | None = None) -> Tensor:
    """Rows of a weight as nn.Linear keeps it, (out, in)."""
    shape, dims = matrix(source.shapes[name]), 3 if attention.order in ("heads", "columns") else 2
    if attention.channel_groups:
        return _by_groups(read_rows(source, name).flatten(1))[start:stop]
    if len(shape) != dims:
        raise ValueError(f"{name} has the shape {tuple(shape)}, expected {dims} dimensions")
    if attention.order == "heads":
        rows = read_rows(source, name)
        return (rows.mT if attention.transposed else rows).flatten(0, 1)
    if attention.order == "columns":
        return read_rows(source, name).flatten(1).mT
    if attention.transposed:
        return read_rows(source, name).mT[start:stop]
    return read_rows(source, name, start, stop).reshape(-1, shape[-1])


def matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the kernel of a convolution of width 1."""
    return shape[:2] if len(shape) > 2 and set(shape[2:]) == {1} else shape


def _by_groups(rows: Tensor) -> Tensor:
    """The weight of a convolution of width 1 in groups of channels as that of a linear map."""
    return block_diag(*rows.chunk(_divide(len(rows), rows.shape[1], f"{len(rows)} channels are not in equal groups")))


def _apart(location: Location, source: Source, heads: int) -> Projections:
    attention = location.attention
    query, key = (read_weight(source, location.names[role] + attention.weight, attention) for role in ("query", "key"))
    name = location.names["query"]
    if attention.gated:
        query = _ungated(query, heads, name)
    if attention.values_behind:
        key = key[: len(key) // 2]
    if "second" in location.names:
        return _twice(query, key, location, source, heads)
    widths = query.shape[-1], key.shape[-1]
    if widths[0] != widths[1]:
        if attention.kind != "cross":
            raise ValueError(f"{name}: keys of width {widths[1]} beside queries of width {widths[0]} have no form")
        # Forms act on the sum of both spaces, which share no dimension.
        query, key = pad(query, (0, widths[1])), pad(key, (widths[0], 0))
    rank = _divide(len(query), heads, f"{name}: {len(query)} rows are not {heads} heads of equal width")
    groups = _divide(len(key), rank, f"{location.names['key']}: {len(key)} rows are not heads of width {rank}")
    shared = _divide(heads, groups, f"{name}: {heads} query heads cannot share {groups} key heads")
    return Projections(
        query.reshape(groups, shared, rank, -1),
        key.reshape(groups, 1, rank, -1),
        _bias(source, location, "query", (groups, shared, rank)),
        _bias(source, location, "key", (groups, 1, rank)),
    )


def _twice(query: Tensor, key: Tensor, location: Location, source: Source, heads: int) -> Projections:
    """Queries and keys that are projected once more, by the weight of nn.MultiheadAttention."""
    name = location.names["second"]
    packed, width = read_rows(source, name), len(query)
    if packed.shape != (3 * width, width):
        raise ValueError(f"{name} has the shape {tuple(packed.shape)}, expected {(3 * width, width)}")
    rank = _divide(width, heads, f"{name}: {width} rows are not {heads} heads of equal width")
    biases = read_rows(source, name.replace("weight", "bias")).reshape(3, heads, 1, rank)
    query, key = (
        (packed[i * width : (i + 1) * width] @ t).reshape(heads, 1, rank, -1) for i, t in enumerate((query, key))
    )
    return Projections(query, key, biases[0], biases[1])


def _ungated(query: Tensor, heads: int, name: str) -> Tensor:
    """The queries among rows that hold, head by head, a query and a gate of the same width."""
    rank = _divide(len(query), 2 * heads, f"{name}: {len(query)} rows are not {heads} heads of a query and a gate")
    return query.reshape(heads, 2, rank, *query.shape[1:])[:, 0].flatten(0, 1)


def _bias(source: Source, location: Location, role: str, shape: tuple[int, ...]) -> Tensor | None:
    bias = _own_bias(source, location, role, shape)
    if role != "query" or "query_shift" not in location.names:
        return bias
    shift = _shaped(read_rows(source, location.names["query_shift"]), shape, location.names["query_shift"])
    return shift if bias is None else bias + shift


def _own_bias(source: Source, location: Location, role: str, shape: tuple[int, ...]) -> Tensor | None:
    name, count = location.bias(role), math.prod(shape)
    if "packed_bias" in location.names:  # of q, k and v one after the other, though their weights are apart
        first, name = 0 if role == "query" else count, location.names["packed_bias"] + location.attention.bias
        return _shaped(read_rows(source, name, first, first + count), shape, name)
    if name not in source.shapes:
        return None
    rows = read_rows(source, name)
    if location.attention.gated and role == "query":
        rows = _ungated(rows, shape[0] * shape[1], name)
    return _shaped(rows, shape, name)


def _shaped(bias: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    if bias.numel() != math.prod(shape):
        raise ValueError(f"{name} has {bias.numel()} values, but its weights have {math.prod(shape)} rows")
    return bias.reshape(shape)


def _fused(location: Location, source: Source, heads: int, head_dim: int | None) -> Projections:
    attention, name = location.attention, location.names["fused"]
    shape = source.shapes[name + attention.weight]
    rows, width = shape[::-1] if attention.transposed else shape
    width = rows // 3 if attention.pool else width  # stages of different widths
    rank = head_dim or _divide(width, heads, f"{name}: a width of {width} is not {heads} heads of equal width")
    start = heads * rank if attention.gated else 0  # gates stand before the queries
    units = _divide(rows - start, rank, f"{name}: {rows} rows are not heads of width {rank}")
    groups = _divide(
        units - heads, 2, f"{name}: {units} blocks of {rank} rows are not {heads} queries, keys and values"
    )
    if groups < 1:
        raise ValueError(f"{name}: {rows} rows are too few for {heads} heads of width {rank}")
    shared = _divide(heads, groups, f"{name}: {heads} query heads cannot share {groups} key heads")
    # In blocks, the values come last and are left unread; in groups they stand between the keys.
    stop = start + (heads + groups) * rank if attention.order == "blocks" else None
    weight = read_weight(source, name + attention.weight, attention, start, stop)
    query, key = _unfuse(weight, attention.order, groups, shared, rank)
    if "query_bias" in location.names:  # DeBERTa's keys have none
        bias_name = location.names["query_bias"]
        return Projections(query, key, _shaped(read_rows(source, bias_name), (groups, shared, rank), bias_name))
    bias = name + attention.bias
    if bias not in source.shapes:
        return Projections(query, key)
    if source.shapes[bias] != (rows,):
        raise ValueError(f"{bias} has {math.prod(source.shapes[bias])} values, but its weights have {rows} rows")
    query_bias, key_bias = _unfuse(read_rows(source, bias, start, stop), attention.order, groups, shared, rank)
    return Projections(query, key, query_bias, key_bias)


def _unfuse(packed: Tensor, order: str, groups: int, shared: int, rank: int) -> tuple[Tensor, Tensor]:
    """Query (groups, shared, r, …) and key (groups, 1, r, …) of rows that were packed in blocks or in groups."""
    rest = packed.shape[1:]
    if order == "groups":
        packed = packed.reshape(groups, shared + 2, rank, *rest)
        return packed[:, :shared], packed[:, shared : shared + 1]
    if order == "quarters":  # CodeGen's, made on four devices: queries, values and keys of each
        packed = packed.reshape(4, 3, -1, *rest)
        return tuple(packed[:, part].reshape(groups, shared, rank, *rest) for part in (0, 2))  # type: ignore[return-value]
    heads = groups * shared
    query, key = packed[: heads * rank], packed[heads * rank : (heads + groups) * rank]
    return query.reshape(groups, shared, rank, *rest), key.reshape(groups, 1, rank, *rest)


@dataclass(frozen=True, eq=False)
class Latent:
    """One kernel of multi-head latent attention, raw and with the latent norms' gains, and what goes down."""

    weights: Projections
    normed: Projections
    query_down: Tensor | None
    key_down: Tensor | None
    query_down_bias: Tensor | None = None
    key_down_bias: Tensor | None = None


def latent(location: Location, source: Source, config: Mapping[str, Any], heads: int, part: str) -> Latent:
    """Compose down- and up-projections, W_up·W_down: of the kernel without positions ("nope"), or the rotary one."""

    def weight(role: str) -> Tensor | None:
        return read_rows(source, location.names[role] + ".weight") if role in location.names else None

    for role in ("query", "query_up", "key_up"):
        if _latent_bias(location, source, role) is not None:
            raise ValueError(f"{location.bias(role)}: biases behind the latents are not read")
    nope, rope, rank = (int(config[k]) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
    here = slice(0, nope) if part == "nope" else slice(nope, nope + rope)
    query_up, query_down, query_gain = weight("query_up"), weight("query_down"), weight("query_latent_norm")
    key_down, key_up, key_gain = weight("key_down"), weight("key_up"), weight("key_latent_norm")
    assert key_down is not None
    assert key_up is not None
    query_shift, key_shift = (_latent_bias(location, source, role) for role in ("query_down", "key_down"))
    lower_shift = None if key_shift is None else key_shift[:rank]
    both = []
    for gained in (False, True):
        query = weight("query") if query_up is None else _compose(query_up, query_down, query_gain if gained else None)
        assert query is not None
        query = query.reshape(heads, 1, nope + rope, -1)[:, :, here]
        shift = _shift(query_up, query_shift, query_gain if gained else None, heads)
        shift = None if shift is None else shift[..., here]
        if part == "nope":
            up = key_up.reshape(heads, -1, rank)[:, :nope]
            key = _compose(up, key_down[:rank], key_gain if gained else None).unsqueeze(1)
            shifts = shift, _shift(up.flatten(0, 1), lower_shift, key_gain if gained else None, heads)
        else:  # one rotary key for all heads
            query, key = query.transpose(0, 1), key_down[rank:].reshape(1, 1, rope, -1)
            shift = None if shift is None else shift.transpose(0, 1)
            shifts = shift, None if key_shift is None else key_shift[rank:].reshape(1, 1, rope)
        if location.attention.latent_scales:  # each latent is multiplied by the root of how much narrower it is
            if any(shift is not None for shift in shifts):
                raise ValueError(f"{location.names['key_down']}: biases of latents that are scaled are not read")
            query = query * (query.shape[-1] / (query.shape[-1] if query_down is None else len(query_down))) ** 0.5
            key = key * (key.shape[-1] / rank) ** 0.5 if part == "nope" else key
        both.append(Projections(query, key, *shifts))
    raw, normed = both
    lower = (key_down[:rank], query_shift, lower_shift) if part == "nope" else (None, query_shift)
    return Latent(raw, normed, query_down, *lower)


def query_latent(location: Location, source: Source, heads: int) -> Latent:
    """Queries composed of down- and up-projections, and keys that pass by no latent."""
    up, down, gain = (
        read_rows(source, location.names[role] + ".weight") for role in ("query_up", "query_down", "query_latent_norm")
    )
    rank = _divide(len(up), heads, f"{location.names['query_up']}: {len(up)} rows are not {heads} heads of equal width")
    key = read_rows(source, location.names["key"] + ".weight")
    groups = _divide(len(key), rank, f"{location.names['key']}: {len(key)} rows are not heads of width {rank}")
    shift, both = _latent_bias(location, source, "query_down"), []
    for norm in (None, gain):
        query, after = _compose(up, down, norm), _shift(up, shift, norm, heads)
        after = None if after is None else after.reshape(groups, -1, rank)
        both.append(
            Projections(query.reshape(groups, -1, rank, down.shape[-1]), key.reshape(groups, 1, rank, -1), after)
        )
    return Latent(both[0], both[1], down, None, shift)


def _compose(up: Tensor, down: Tensor | None, gain: Tensor | None) -> Tensor:
    assert down is not None
    return (up if gain is None else up * gain.to(up.dtype)) @ down


def _latent_bias(location: Location, source: Source, role: str) -> Tensor | None:
    there = role in location.names and location.bias(role) in source.shapes
    return read_rows(source, location.bias(role)) if there else None


def _shift(up: Tensor | None, bias: Tensor | None, gain: Tensor | None, heads: int) -> Tensor | None:
    """What the bias of a latent becomes behind it, (heads, 1, r)."""
    return None if up is None or bias is None else _compose(up, bias[:, None], gain).reshape(heads, 1, -1)


def _divide(whole: int, parts: int, otherwise: str) -> int:
    if parts < 1 or whole % parts:
        raise ValueError(otherwise)
    return whole // parts
