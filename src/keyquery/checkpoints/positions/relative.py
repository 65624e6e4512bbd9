"""What positions add to q·k: tables of biases, and vectors that meet queries or keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keyquery.checkpoints.layer import Layer
from keyquery.checkpoints.layouts import read_rows
from keyquery.checkpoints.positions.sequence import context_of
from keyquery.checkpoints.sources import Source

Config = Mapping[str, Any]
Positions = Int[Tensor, " n"]
TABLES = ("window", "window with class", "continuous")  # biases by rows and columns
VECTORS = ("decomposed", "disentangled", "transformer-xl", "xlnet", "relative keys", "shaw", "context")
# Terms of the inputs of a model, which are not read, and what they are made of.
GIVEN = {
    "gated": "a bias of distances, scaled by a gate of the query's token,",
    "boxes": "a bias of the boxes of two tokens",
    "scaled boxes": "a bias of the boxes of two tokens",
    "box vectors": "the product of a query with a vector of the boxes of two tokens",
}


@dataclass(frozen=True, eq=False)
class Relative:
    """A term c·v of the scaled score, c the content of one token and v a vector for where the two stand.

    Where `side` is "query", it is scale·(q_i + bias)·v[index_ij], else scale·k_j·v[index_ij].
    """

    side: str
    vectors: Float[Tensor, "heads count r"]
    index: Int[Tensor, "n m"]
    scale: float
    bias: Float[Tensor, "heads r"] | None = None

    def scores(
        self, content: Float[Tensor, "*batch heads tokens r"], constant: bool = True
    ) -> Float[Tensor, "*batch heads n m"]:
        """The term for queries (..., heads, n, r), or for keys (..., heads, m, r); its bias is left out on request."""
        content = content + self.bias.to(content)[:, None] if constant and self.bias is not None else content
        products = self.scale * content @ self.vectors.to(content).mT
        index = self.index if self.side == "query" else self.index.mT
        chosen = products.gather(-1, index.to(content.device).expand(*products.shape[:-1], -1))
        return chosen if self.side == "query" else chosen.mT

    def of_heads(self, chosen: slice) -> Relative:
        """The same for some heads."""
        vectors = self.vectors if len(self.vectors) == 1 else self.vectors[chosen]
        return replace(self, vectors=vectors, bias=None if self.bias is None else self.bias[chosen])

    def of_scaled(self, scale: float) -> Relative:
        """The same for queries that are multiplied by `scale` already."""
        if self.side == "key":
            return self
        return replace(self, scale=self.scale / scale, bias=None if self.bias is None else self.bias * scale)


def table_bias(
    layer: Layer, source: Source, config: Config, queries: Positions, keys: Positions
) -> Float[Tensor, "heads n m"]:
    """Biases of tokens of a square window, by the differences of their rows and columns; a class token has its own."""
    if layer.position == "continuous":
        table = _continuous_table(layer, source, config, len(keys))
    else:
        table = read_rows(source, layer.modules["window_table"]).double()
    classes = 3 if layer.position == "window with class" else 0
    width = math.isqrt(len(table) - classes)
    if width**2 != len(table) - classes or not width % 2:
        raise ValueError(f"{layer.name}: a table of {len(table)} biases is not that of a square window")
    side = (width + 1) // 2
    first = 1 if classes else 0
    rows, columns = (
        _differences(
            torch.div(queries - first, side, rounding_mode="floor"),
            torch.div(keys - first, side, rounding_mode="floor"),
        ),
        _differences((queries - first) % side, (keys - first) % side),
    )
    index = (rows + side - 1) * width + columns + side - 1
    if classes:  # from the class token, to it, and to itself
        first_query, first_key = (queries == 0)[:, None], (keys == 0)[None]
        for holds, row in ((first_query, -3), (first_key, -2), (first_query & first_key, -1)):
            index = torch.where(holds, len(table) + row, index)
    return table[index].permute(2, 0, 1)


def _continuous_table(layer: Layer, source: Source, config: Config, tokens: int) -> Float[Tensor, "differences heads"]:
    """Swin v2's biases of a window: an MLP of the logarithms of differences of rows and columns."""
    side = math.isqrt(tokens)
    trained = config.get("pretrained_window_sizes") or [0]
    stages = [int(part) for part in layer.name.split(".") if part.isdecimal()]
    widest = int(trained[stages[0]]) if len(stages) > 1 and stages[0] < len(trained) else 0
    far = torch.arange(1 - side, side, dtype=torch.float64) / max((widest or side) - 1, 1) * 8
    far = far.sign() * (far.abs() + 1).log2() / 3
    first, last = layer.modules["coordinates"], layer.modules["coordinate_biases"]
    weight, bias = (read_rows(source, f"{first}.{part}").double() for part in ("weight", "bias"))
    hidden = (torch.cartesian_prod(far, far) @ weight.mT + bias).relu()
    return 16 * (hidden @ read_rows(source, f"{last}.weight").double().mT).sigmoid()


def relatives(layer: Layer, source: Source, config: Config, queries: Positions, keys: Positions) -> list[Relative]:
    """The terms of a layer that depend on the content of one token and on where both stand."""
    match layer.position:
        case "decomposed":
            return _decomposed(layer, source, queries, keys)
        case "disentangled":
            return _disentangled(layer, source, config, queries, keys)
        case "transformer-xl" | "xlnet":
            return [_transformer_xl(layer, source, queries, keys)]
        case "relative keys":
            return [_relative_keys(layer, source, config, queries, keys)]
        case "shaw":
            return [_shaw(layer, source, queries, keys)]
        case "context":
            return [_in_context(layer, source, config, queries, keys)]
    return []


def _differences(queries: Tensor, keys: Tensor) -> Int[Tensor, "n m"]:
    return queries[:, None] - keys


def _decomposed(layer: Layer, source: Source, queries: Positions, keys: Positions) -> list[Relative]:
    """A vector for the difference of rows, and one for that of columns."""
    tables = [read_rows(source, layer.modules[role]) for role in ("row_table", "column_table")]
    sizes = [(len(table) + 1) // 2 for table in tables]
    places = [[torch.div(index, sizes[1], rounding_mode="floor"), index % sizes[1]] for index in (queries, keys)]
    if int(queries.max()) >= sizes[0] * sizes[1]:
        raise ValueError(f"{layer.name}: positions are known for a grid of {sizes[0]} × {sizes[1]} tokens")
    return [
        Relative("query", table[None], _differences(of_query, of_key) + size - 1, 1.0)
        for table, size, of_query, of_key in zip(tables, sizes, *places, strict=True)
    ]


def _disentangled(layer: Layer, source: Source, config: Config, queries: Positions, keys: Positions) -> list[Relative]:
    """DeBERTa's vectors: embeddings of distances, projected as keys ("c2p") and as queries ("p2c")."""
    if not config.get("relative_attention"):
        return []
    embeddings = read_rows(source, layer.modules["distances"] + ".weight")
    if "layer_norm" in str(config.get("norm_rel_ebd") or ""):
        shape, name = embeddings.shape[-1:], layer.modules["distance_norm"]
        gain, shift = (read_rows(source, f"{name}.{part}") for part in ("weight", "bias"))
        eps = float(config.get("layer_norm_eps", 1e-7))
        embeddings = torch.nn.functional.layer_norm(embeddings.float(), shape, gain.float(), shift.float(), eps)
    furthest = int(config.get("max_relative_positions", -1))
    furthest = furthest if furthest >= 1 else int(config["max_position_embeddings"])
    buckets = int(config.get("position_buckets", -1))
    span = buckets if buckets > 0 else furthest
    far = _differences(queries, keys)
    far = _log_buckets(far, buckets, furthest) if buckets > 0 else far
    index = (far + span).clamp(0, 2 * span - 1)
    terms = []
    for kind, side, role in (("c2p", "query", "distance_key"), ("p2c", "key", "distance_query")):
        if kind in (config.get("pos_att_type") or []):
            projected = _projected(layer, source, embeddings[: 2 * span], role)
            terms.append(Relative(side, projected, index, layer.scale))
    return terms


def _log_buckets(far: Tensor, buckets: int, furthest: int) -> Tensor:
    middle = buckets // 2
    distance = torch.where(far.abs() < middle, middle - 1, far.abs()).double()
    log = torch.ceil(torch.log(distance / middle) / math.log((furthest - 1) / middle) * (middle - 1)) + middle
    return torch.where(distance <= middle, far, (log * far.sign()).long())


def _projected(layer: Layer, source: Source, embeddings: Tensor, role: str) -> Float[Tensor, "heads count r"]:
    """Embeddings of distances as keys or queries: by a projection of their own, or by the layer's."""
    if role in layer.modules:
        name = layer.modules[role]
        rows = embeddings @ _weight(source, name).to(embeddings).mT
        if f"{name}.bias" in source.shapes:
            rows = rows + read_rows(source, f"{name}.bias").to(rows)
        return rows.unflatten(-1, (layer.heads, -1)).transpose(0, 1)
    query, key = layer.weights.apply(embeddings, embeddings)
    return (key if role == "distance_key" else query).flatten(0, 1)


def _weight(source: Source, name: str) -> Float[Tensor, "out d"]:
    """A weight as nn.Linear keeps it; XLNet's are (d, heads, r)."""
    linear = f"{name}.weight" in source.shapes
    return read_rows(source, f"{name}.weight") if linear else read_rows(source, name).flatten(1).mT


def _transformer_xl(layer: Layer, source: Source, queries: Positions, keys: Positions) -> Relative:
    """A projection of the sines and cosines of the distance meets the query and a bias of its own."""
    far = _differences(queries, keys)
    least = int(far.min())
    width = layer.weights.query.shape[-1]
    frequencies = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(least, int(far.max()) + 1, dtype=torch.float64)[:, None] * frequencies
    parts = (angles.sin(), angles.cos())
    waves = torch.cat(parts, -1) if layer.position == "xlnet" else torch.stack(parts, -1).flatten(1)
    vectors = _projected(layer, source, waves, "distance_key")
    bias = read_rows(source, layer.modules["distance_bias"]).reshape(layer.heads, -1)
    # The layer's queries hold the bias of the content's term: it is taken off again.
    content_bias = read_rows(source, layer.modules["content_bias"]).reshape(layer.heads, -1)
    return Relative("query", vectors, far - least, layer.scale, bias - content_bias)


def _relative_keys(layer: Layer, source: Source, config: Config, queries: Positions, keys: Positions) -> Relative:
    """A vector for each distance of a key, up to a furthest one on either side, the same for all heads."""
    bounds = (("left", 64), ("right", 8))  # the defaults of wav2vec2-BERT
    left, right = (int(config.get(f"{side}_max_position_embeddings", default)) for side, default in bounds)
    index = (-_differences(queries, keys)).clamp(-left, right) + left
    return Relative("query", read_rows(source, layer.modules["distances"] + ".weight")[None], index, layer.scale)


def _shaw(layer: Layer, source: Source, queries: Positions, keys: Positions) -> Relative:
    """A vector for each distance of a query behind a key; distance 0 stands in the middle of the table."""
    table = read_rows(source, layer.modules["distances"] + ".weight")
    middle = len(table) // 2
    index = _differences(queries, keys).clamp(-middle, len(table) - 1 - middle) + middle
    return Relative("query", table[None], index, layer.scale)


def _in_context(layer: Layer, source: Source, config: Config, queries: Positions, keys: Positions) -> Relative:
    """The audio towers of Gemma: a projection of the sines and cosines of the distance meets the query.

    Gemma 4 has vectors for half of the keys of a chunk, counted from the last of them; the others meet none.
    """
    far, width = _differences(queries, keys), layer.weights.query.shape[-1]
    past = context_of(config)[0]
    chunk = config.get("attention_chunk_size")
    most = past if chunk is None else (int(chunk) + past) // 2
    far = far + most - past
    frequencies = 10000.0 ** -(torch.arange(width // 2, dtype=torch.float64) / max(width // 2 - 1, 1))
    angles = torch.arange(most + 1, dtype=torch.float64)[:, None] * frequencies
    vectors = _projected(layer, source, torch.cat((angles.sin(), angles.cos()), -1), "distance_key")
    none = vectors.new_zeros(layer.heads, 1, vectors.shape[-1])
    index = torch.where((far >= 0) & (far <= most), far, most + 1)
    return Relative("query", torch.cat((vectors, none), 1), index, layer.weights.query.shape[2] ** -0.5)
