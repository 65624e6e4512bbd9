"""Terms of positions that need more than where two tokens stand: the boxes of their words, or what a token is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints.layer import Layer
from keyquery.checkpoints.layouts import read_rows
from keyquery.checkpoints.positions.sequence import t5_bias
from keyquery.checkpoints.sources import Source

Config = Mapping[str, Any]
# What they are made of, for notes.
GIVEN = {
    "gated": "a bias of distances, scaled by a gate of the query's token,",
    "boxes": "a bias of the boxes of two tokens",
    "scaled boxes": "a bias of the boxes of two tokens",
    "box vectors": "the product of a query with a vector of the boxes of two tokens",
}
SIDE = 1000  # of a page, on which boxes of words are given
CORNERS = [0, 1, 2, 1, 2, 3, 0, 3]  # of a box in BROS: x and y in turn


def given_term(
    layer: Layer, source: Source, config: Config, tokens: Float[Tensor, "batch n d"], inputs: Mapping[str, Any]
) -> Float[Tensor, "#batch heads n n"]:
    """The term of the scaled score of tokens that enter a layer, from the model's inputs."""
    match layer.position:
        case "gated":
            return _gated(layer, source, config, tokens)
        case "boxes":
            return _layout_boxes(layer, source, config, tokens.shape[-2], inputs)[None]
        case "scaled boxes":
            return _scaled_boxes(layer, source, config, tokens.shape[-2], inputs)[None]
        case "box vectors":
            return _box_vectors(layer, source, config, tokens, inputs)
    raise ValueError(f"{layer.name} has no term of positions that needs a model's inputs")


def _bucketed(table: Tensor, offsets: Tensor, furthest: int) -> Float[Tensor, "heads n n"]:
    """Biases (buckets, heads) by offsets of any kind, in T5's buckets."""
    bias = t5_bias(table, offsets.flatten(), False, {"relative_attention_max_distance": furthest})
    return bias.reshape(-1, *offsets.shape)


def _offsets(places: Tensor) -> Tensor:
    """Key minus query."""
    return places - places[:, None]


def _gated(layer: Layer, source: Source, config: Config, tokens: Tensor) -> Tensor:
    """WavLM's: T5's bias times a gate of the query's token, of whose dimensions each head has its own."""
    table = read_rows(source, layer.modules["bias_table"] + ".weight")
    bias = _bucketed(table, _offsets(torch.arange(tokens.shape[-2])), int(config.get("max_bucket_distance", 800)))
    name = layer.modules["gate"]
    weight, shift = (read_rows(source, f"{name}.{part}").to(tokens) for part in ("weight", "bias"))
    heads = tokens.unflatten(-1, (layer.heads, -1)).transpose(1, 2)
    first, second = (heads @ weight.mT + shift).unflatten(-1, (2, 4)).sum(-1).sigmoid().unbind(-1)
    constant = read_rows(source, layer.modules["gate_constant"]).to(tokens).reshape(-1, 1)
    return (first * (second * constant - 1) + 2).unsqueeze(-1) * bias.to(tokens)


def _boxes(inputs: Mapping[str, Any], layer: Layer) -> Tensor:
    boxes = inputs.get("bbox")
    if not isinstance(boxes, Tensor) or len(boxes) != 1:
        raise ValueError(f"{layer.name}: its scores need bbox, the boxes of the tokens of one sequence")
    return boxes[0]


def _layout_boxes(layer: Layer, source: Source, config: Config, count: int, inputs: Mapping[str, Any]) -> Tensor:
    """LayoutLMv3's: by offset, by left edges, and by lower edges; the patches of an image follow the words."""
    boxes = _boxes(inputs, layer)
    places = torch.arange(len(boxes))
    if count > len(boxes):
        patches = _patch_boxes(int(config.get("input_size", 224)) // int(config.get("patch_size", 16))).to(boxes)
        boxes, places = torch.cat((boxes, patches)), torch.cat((places, torch.arange(len(patches))))
    if count != len(boxes):
        raise ValueError(f"{layer.name}: {count} tokens, but boxes of {len(boxes)}")
    terms = [("bias_table", places, "max_rel_pos", 128)]
    if config.get("has_spatial_attention_bias", True):
        terms += [("column_bias", boxes[:, 0], "max_rel_2d_pos", 256), ("row_bias", boxes[:, 3], "max_rel_2d_pos", 256)]
    tables = (read_rows(source, layer.modules[role] + ".weight").mT for role, *_ in terms)
    biases = [
        _bucketed(table, _offsets(offsets), int(config.get(key, default)))
        for table, (_, offsets, key, default) in zip(tables, terms, strict=True)
    ]
    return layer.scale * torch.stack(biases).sum(0)


def _patch_boxes(side: int) -> Tensor:
    """The boxes of a class token and of the patches of a square image, on a page."""
    edges = torch.arange(side + 1) * SIDE // side
    row, column = (axis.flatten() for axis in torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"))
    patches = torch.stack((edges[column], edges[row], edges[column + 1], edges[row + 1]), -1)
    return torch.cat((torch.tensor([[1, 1, SIDE - 1, SIDE - 1]]), patches))


def _scaled_boxes(layer: Layer, source: Source, config: Config, count: int, inputs: Mapping[str, Any]) -> Tensor:
    """UDOP's: a table for the offset, one for the middles of boxes from left to right, and one from top to bottom."""
    boxes = _boxes(inputs, layer).float()
    if count != len(boxes):
        raise ValueError(f"{layer.name}: {count} tokens, but boxes of {len(boxes)}: images beside words are not read")
    places = {"1d": torch.arange(count).float(), "horizontal": boxes[:, [0, 2]].mean(-1)}
    places["vertical"] = boxes[:, [1, 3]].mean(-1)
    biases = []
    for index, facts in enumerate(config.get("relative_bias_args") or [{"type": kind} for kind in places]):
        kind = facts["type"]
        factor, furthest = (facts.get("scaling_factor", 1 if kind == "1d" else 100), 128 if kind == "1d" else 100)
        name = f"{layer.modules['bias_tables'].removesuffix('.0.relative_attention_bias')}.{index}"
        table = read_rows(source, f"{name}.relative_attention_bias.weight")
        offsets = (_offsets(places[kind]) * factor).long()
        biases.append(_bucketed(table, offsets, int(facts.get("max_distance", furthest))))
    return torch.stack(biases).sum(0)


def _box_vectors(
    layer: Layer, source: Source, config: Config, tokens: Tensor, inputs: Mapping[str, Any]
) -> Float[Tensor, "batch heads n n"]:
    """BROS: sines and cosines of the differences of all corners, projected to the width of a head."""
    corners = _boxes(inputs, layer).to(tokens) * float(config.get("bbox_scale", 100.0))
    corners = corners[:, CORNERS] if corners.shape[-1] == 4 else corners
    frequencies = read_rows(source, layer.modules["box_frequencies"]).to(tokens)
    angles = (corners - corners[:, None]).unsqueeze(-1) * frequencies
    waves = torch.cat((angles.sin(), angles.cos()), -1).flatten(-2)
    vectors = waves @ read_rows(source, layer.modules["box_projection"] + ".weight").to(tokens).mT
    query, _ = layer.project(tokens)
    return layer.scale * torch.einsum("bhid,ijd->bhij", query.flatten(1, 2), vectors)
