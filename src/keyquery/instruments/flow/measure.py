"""Measures flow over the maps of a tensor, or of a model that is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from keyquery.checkpoints import read
from keyquery.instruments.flow.counting import Crossing, HeadMap
from keyquery.layers import Attention
from keyquery.listening.call import Call
from keyquery.listening.hooks import Batch
from keyquery.listening.maps import check_rows, is_square, layers_of, maps_by_head, run_with, stack_of
from keyquery.support.checks import check_float
from keyquery.support.printable import first_line


def flow_of_model(model: nn.Module, batch: Batch, crossing: Crossing) -> dict[str, Any]:
    """Run a model and sum its attention as it is computed."""
    tokens, name = len(crossing.labels[0]), type(model).__name__
    outputs, reason = output_maps(model)
    unknown: dict[int, str] = {}  # modules of calls whose output projection is not known

    def add(call: Call, number: int) -> None:
        if not is_square(call) or call.key.shape[-2] != tokens:
            return
        norms = value_norms(outputs, call)
        if norms is None:
            unknown[number] = call.name
        crossing.add(number, stack_of(call.name), len(call.query), _head_maps(call, norms))

    layers = layers_of(model, *run_with(model, batch, add), tokens)
    texts = len(crossing.sums.get(layers[0].number, ()))
    crossing.check(f"the attention of {name}", {layer.tokens for layer in layers}, texts)
    heads = sorted({len(crossing.sums[layer.number][0]) for layer in layers})
    if len(heads) != 1:
        raise ValueError(f"{name} has layers of {' and '.join(map(str, heads))} heads: not supported")
    missing = next((unknown[layer.number] for layer in layers if layer.number in unknown), None)
    reason = reason or (None if missing is None else f"the output projection of {missing} is not known")
    depths = (len(layers), texts) if texts > 1 else (len(layers),)
    return {
        **crossing.fields([layer.number for layer in layers], (*depths, *heads), depths),
        "sizes": {"layers": len(layers), "heads": heads[0]},
        "notes": [f"norm-weighted flow is not available: {reason}"] if reason else [],
    }


def _head_maps(call: Call, norms: Float[Tensor, "batch heads n"] | None) -> Iterator[HeadMap]:
    """The maps of a call, one head at a time; rows of padding are 0."""
    shape = (len(call.query), call.heads, *call.query.shape[-2:-1], *call.key.shape[-2:-1])
    mask = torch.ones((), dtype=torch.bool, device=call.query.device) if call.mask is None else call.mask
    visible = mask.expand(shape)
    for head, maps in maps_by_head(call):
        for text, attention in enumerate(maps[:, 0]):
            real = None if call.real is None else call.real[text].to(attention.device)
            if call.real_queries is not None:
                attention = attention.masked_fill(~call.real_queries[text, :, None], 0.0)
            yield HeadMap(text, attention, visible[text, head], real, None if norms is None else norms[text, head])


def output_maps(model: nn.Module) -> tuple[Mapping[str, Float[Tensor, "key_heads group r width"]], str | None]:
    """Output projections of a model's heads by the name of the attention module, or why there are none."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    if layers:
        return {name: _output_of(layer) for name, layer in layers.items()}, None
    try:
        heads = read(model)
        return {layer.name: heads.values(layer.index).output for layer in heads if layer.kind == "self"}, None
    except (ValueError, TypeError, KeyError) as error:
        return {}, first_line(error)


def _output_of(layer: Attention) -> Float[Tensor, "key_heads group r width"]:
    return layer.output.weight.detach().mT.unflatten(0, (layer.kv_heads, -1, layer.head_dim))


def value_norms(outputs: Mapping[str, Tensor], call: Call) -> Float[Tensor, "batch heads m"] | None:
    """‖W_O(W_V x + b_V)‖ of every key of a call, 0 for padding; None if its output projection is not known."""
    # The projection is of the attention that the module is, contains, or is part of.
    module = f"{call.name}."
    near = (name for name in outputs if module.startswith(f"{name}.") or f"{name}.".startswith(module))
    output = outputs.get(next(near, ""))
    if output is None or call.value is None or output.shape[2] != call.value.shape[-1]:
        return None
    if output.shape[0] * output.shape[1] != call.heads:
        return None
    value, output = call.value.double(), output.flatten(0, 1).to(call.value.device).double()
    output = output.unflatten(0, (value.shape[1], -1))
    # ‖v W‖ through the r × r matrix W Wᵀ.
    products = (value.unsqueeze(2) @ (output @ output.mT)) * value.unsqueeze(2)
    norms = products.sum(-1).clamp(min=0).sqrt().flatten(1, 2)
    return norms if call.real is None else norms.where(call.real[:, None].to(norms.device), 0.0)


def flow_of_tensor(attention: Any, crossing: Crossing, mask: Any) -> dict[str, Any]:
    """Sum the attention of a tensor (..., n, n), or of a list of one per layer."""
    layered, layers = _layers(attention)
    lead, count = layers[0].shape[:-2], layers[0].shape[-1]
    texts = int(np.prod(lead[:-1]))
    crossing.check("the attention", {count}, texts)
    visible = _visible(torch.ones(count, count, dtype=torch.bool) if mask is None else mask, lead, count)
    for call, layer in enumerate(layers):
        maps = layer.reshape(texts, -1, count, count)
        seen = visible.to(layer.device).reshape(maps.shape)
        check_rows(maps.flatten(0, 1), seen.any(-1).flatten(0, 1))
        if bool((maps * ~seen).any()):
            raise ValueError("attention must be 0 where mask is False")
        by_head = (HeadMap(text, maps[text, head], seen[text, head]) for text, head in np.ndindex(texts, maps.shape[1]))
        crossing.add(call, "", texts, by_head)
    shape = (len(layers), *lead) if layered else tuple(lead)
    depths = shape[:-1] if len(shape) > 1 or not layered else shape  # of a rollout: all but heads
    sizes = {**({"layers": len(layers)} if layered else {}), "heads": maps.shape[1]}
    return {**crossing.fields(range(len(layers)), shape, depths), "sizes": sizes}


def _layers(attention: Any) -> tuple[bool, list[Float[Tensor, "*lead n n"]]]:
    """Whether the first dimension is layers, and the attention of each layer."""
    listed = attention is None or isinstance(attention, (list, tuple))
    if listed and (not attention or any(part is None for part in attention)):  # as models return without maps
        raise ValueError(
            "attention contains no maps: fused attention returns none. Load the model with "
            "attn_implementation='eager', or pass the model itself: kq.flow(model, inputs=...)"
        )
    layers = [torch.as_tensor(layer) for layer in (attention if listed else [attention])]
    for number, layer in enumerate(layers):
        check_float(f"attention[{number}]" if listed else "attention", layer, "... n n")
    if len(shapes := dict.fromkeys(tuple(layer.shape) for layer in layers)) != 1:
        raise ValueError(f"all layers of attention must have one shape, got {' and '.join(map(str, shapes))}")
    layered = listed or layers[0].ndim > 3
    layers = [layer.detach() for layer in (layers if listed or not layered else layers[0])]
    shape = layers[0].shape
    if shape[-1] != shape[-2]:
        raise ValueError(f"attention must be (..., n, n), of tokens to the same tokens, got {tuple(shape)}")
    # A batch dimension of 1, as models return it, is dropped.
    return layered, [layer[0] for layer in layers] if layered and len(shape) == 4 and shape[0] == 1 else layers


def _visible(mask: Any, lead: Sequence[int], count: int) -> Bool[Tensor, "*lead n n"]:
    """Visible pairs, from non-padding tokens or from pairs."""
    mask = torch.as_tensor(mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, True where attention may go, got {mask.dtype}")
    if mask.shape == (count,):
        mask = mask & mask.unsqueeze(-1)
    if mask.shape[-2:] != (count, count):
        raise ValueError(f"mask must be ({count},) or (..., {count}, {count}), got {tuple(mask.shape)}")
    try:
        return mask.expand(*lead, count, count)
    except RuntimeError:
        had = tuple(mask.shape[:-2])
        raise ValueError(f"mask has leading dimensions {had}, but each layer of the attention {tuple(lead)}") from None
