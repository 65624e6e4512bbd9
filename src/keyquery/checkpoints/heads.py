"""Heads: the attention layers of a checkpoint, read one at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keyquery.checkpoints.family import Family
from keyquery.checkpoints.labels import layer_labels
from keyquery.checkpoints.layer import LatentLayer, Layer, Projections, moved
from keyquery.checkpoints.layouts import Values, count_heads, latent, projections, query_latent, read_rows, values
from keyquery.checkpoints.locations import Location, gap, locations, module_name, section
from keyquery.checkpoints.norms import dim_scale, epsilon, read_norms, require_finite
from keyquery.checkpoints.positions.grids import axial_of
from keyquery.checkpoints.positions.notes import layer_notes, position_of, precision_notes
from keyquery.checkpoints.positions.relative import TABLES, VECTORS, Relative, relatives, table_bias
from keyquery.checkpoints.positions.sequence import (
    alibi,
    chunk_of,
    clipped_bias,
    context_limit,
    is_causal,
    rope_of,
    scale_of,
    t5_bias,
    window_of,
)
from keyquery.checkpoints.sources import Live, Recorded, Source
from keyquery.forms import Form, Rope
from keyquery.support.printable import NAME, REPR, first_line, printable

EMBEDDINGS = ("word_embeddings", "wte", "embed_tokens", "tok_embeddings", "embed_in", "shared", "token_embedding")
EMBEDDED = (*(f"{part}.weight" for part in (*EMBEDDINGS, "tokens")), "embed.W_E")  # name suffixes


class Heads:
    """The attention layers of a checkpoint: a sequence that loads layers lazily and caches none; see `kq.read`."""

    device: torch.device | None = None  # where layers are read to; None: where their weights are

    def __init__(
        self,
        source: Source,
        family: Family,
        heads: int | None = None,
        notes: tuple[str, ...] = (),
        gaps: bool = False,
        positions: bool = True,
    ) -> None:
        """`gaps`: layers may have no attention. `positions`: whether they are read, as where known to be right."""
        self.source, self.family, self._given, self._notes = source, family, heads, notes
        self._positions = positions
        located = locations(family, source.shapes, source.config)
        if not located:
            raise ValueError(f"{source.label} has no attention layer of family {family.name}")
        missing = [name for location in located if (name := location.lacks())]
        missing += [name] if not gaps and (name := gap(located, source.shapes)) else []
        if missing:
            raise ValueError(f"{source.label} lacks {printable(missing[0], NAME)}")
        weights = [location.anchor + location.attention.weight for location in located]
        widths = {shape[-1] for name in weights if (shape := source.shapes.get(name))} if heads is not None else {}
        if len(widths) > 1 and not source.config and not isinstance(source, Live):
            raise ValueError(
                f"{source.label} has attention of widths {', '.join(map(str, sorted(widths)))}, which one number of "
                "heads does not fit: give a config that says them (config=, --config)"
            )
        self._locations = list(_kernels(located, source.config))

    def __repr__(self) -> str:
        count = f"{len(self)} layer{'s' if len(self) != 1 else ''}"
        return printable(f"Heads({self.model['name']}: {count}, family {self.family.name})", REPR)

    def __len__(self) -> int:
        return len(self._locations)

    def __getitem__(self, index: Any) -> Any:
        """Layer `index`, read now; a slice gives a list of layers."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._placed(self._read(index % len(self) if -len(self) <= index < len(self) else index))

    def __iter__(self) -> Iterator[Layer]:
        return (self[index] for index in range(len(self)))

    def _placed(self, tensors: Any) -> Any:
        """A layer, or a tensor, on the device that was asked for."""
        return tensors if self.device is None else moved(tensors, self.device)

    def recorded(self, into: dict[str, str] | None = None) -> dict[str, str]:
        """Digests of the tensors read from now on, by name; filled as they are read."""
        digests = {} if into is None else into
        self.source = Recorded(self.source, digests)
        return digests

    @property
    def config(self) -> Mapping[str, Any]:
        """The config of the checkpoint."""
        return self.source.config

    @property
    def model(self) -> dict[str, Any]:
        """Facts for provenance; with labels of layers if they are not just numbers."""
        name = os.path.basename(self.source.label.rstrip("/")) or self.source.label
        facts = {"name": name, "family": self.family.name, "model_type": self.config.get("model_type")}
        labels = self.labels()
        named = {} if labels == [str(index) for index in range(len(self))] else {"labels": labels}
        return {**facts, "layers": len(self), **named}

    def labels(self) -> list[str]:
        """Labels of the layers: "encoder 0", "cross 3", "0 rope", or numbers if there is one stack."""
        return layer_labels(self._named())

    def _named(self) -> list[tuple[str, str]]:
        """Name and kind of every layer."""
        return [(_name(location, part), location.attention.kind) for location, part in self._locations]

    @property
    def output(self) -> Iterator[Form]:
        """The OV circuits of each layer as Forms: W_O W_V of every head."""
        return (self._read_output(index) for index in range(len(self)))

    def embedding(self) -> Float[Tensor, "vocabulary width"] | None:
        """The token embeddings, if the checkpoint has them."""
        name = self._embedding()
        return None if name is None else self._placed(self.source.rows(name))

    @property
    def embedding_shape(self) -> tuple[int, ...] | None:
        """Shape of the token embeddings, without loading them."""
        name = self._embedding()
        return None if name is None else self.source.shapes[name]

    def _embedding(self) -> str | None:
        named = (name for name, shape in self.source.shapes.items() if len(shape) == 2)
        return next((name for name in named if name.endswith(EMBEDDED)), None)

    def depth(self) -> int:
        """Number of layers of the stack; raises for two stacks, an encoder with a decoder."""
        names = {module_name(location) for location, _ in self._locations}
        stacks = {re.sub(r"\d+", "…", name) for name in names}
        if len(stacks) > 1:
            raise ValueError(
                f"{self.source.label} has attention in {' and in '.join(sorted(stacks))}, not in one stack"
            )
        if any(location.attention.shared for location, _ in self._locations):
            return int(self.config.get("num_hidden_layers", len(names)))
        return len(names)

    def position_bias(self, layer: Layer, offsets: Tensor) -> Float[Tensor, "heads n"] | None:
        """The position bias of the scaled score by offset (key − query position), if any."""
        if layer.position in ("alibi", "scaled alibi"):
            return alibi(layer.heads, offsets) * (layer.scale if layer.position == "scaled alibi" else 1)
        if layer.position == "t5" and "bias_table" in layer.modules:
            table = self.source.rows(layer.modules["bias_table"] + ".weight")
            return t5_bias(table, offsets, layer.causal, self.config)
        if layer.position == "clipped":
            return clipped_bias(self.source.rows(layer.modules["bias_table"] + ".weight"), offsets)
        return None

    def pair_bias(self, layer: Layer, queries: Tensor, keys: Tensor) -> Float[Tensor, "heads n m"] | None:
        """The position bias of the scaled score, whatever the tokens at these positions are, if any."""
        if layer.position in TABLES:
            return table_bias(layer, self.source, self._config_of(self._locations[layer.index][0]), queries, keys)
        bias = self.position_bias(layer, (keys - queries[:, None]).flatten())
        return None if bias is None else bias.reshape(-1, len(queries), len(keys))

    def relatives(self, layer: Layer, queries: Tensor, keys: Tensor) -> list[Relative]:
        """Terms of the scaled score that depend on one token's content, and on the positions of both."""
        if layer.position not in VECTORS:
            return []
        return relatives(layer, self.source, self._config_of(self._locations[layer.index][0]), queries, keys)

    def _read(self, index: int) -> Layer:
        try:
            return self._layer(index)
        except torch.OutOfMemoryError:
            raise
        except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
            # Configs and shapes of untrusted files may be anything.
            name = module_name(self._locations[index][0])
            raise ValueError(
                f"{self.source.label}: {name} cannot be read as {self.family.name}: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error

    def _layer(self, index: int) -> Layer:
        location, part = self._locations[index]
        attention, config = location.attention, self._config_of(location)
        count = count_heads(location, self.source, config, self._given)
        kernel = None
        if attention.order == "latent":
            kernel = latent(location, self.source, config, count, part)
            weights, width = kernel.weights, int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
        elif attention.order == "query latent":
            kernel = query_latent(location, self.source, count)
            weights, width = kernel.weights, kernel.weights.query.shape[2]
        else:
            asked = config.get(attention.head_dim)
            weights = projections(location, self.source, count, asked if isinstance(asked, int) else None)
            _check_stated(location, self.source, config, weights)
            weights = _with_content_bias(location, self.source, weights)
            if "query_norm" not in location.names:
                weights = _with_dim_scale(weights, dim_scale(location, self.source))
            width = weights.query.shape[2]
        norms = read_norms(location, self.source, config, weights)
        shifted = any(norms[role].shift is not None for role in ("query_norm", "key_norm") if role in norms)
        name, stored = _name(location, part), precision_notes(self.source, location)
        softcap = config.get(attention.softcap) if attention.softcap else None
        for role in ("query", "key", "query_bias", "key_bias"):
            require_finite(name, getattr(weights, role), f"{role.replace('_', ' ')} weights")
        rope = self._rope(location, config, weights.query.shape[2]) if self._positions and part != "nope" else None
        if rope is not None and attention.norm_after_rope and "query_norm" in norms:
            rope = replace(rope, factor=1.0)  # a norm cancels it
        context = context_limit(attention, config, location.layer, rope) if self._positions and config else None
        if context is not None:
            stored = (*stored, f"scores of positions from {context:,} on are scaled in another way, which is not read")
        facts: dict[str, Any] = {
            "index": index,
            "label": self.labels()[index],
            "name": name,
            "kind": attention.kind,
            "causal": is_causal(attention, config),
            "weights": weights,
            "scale": scale_of(attention, config, location.layer, width, count),
            "window": window_of(attention, config, location.layer),
            "chunk": chunk_of(attention, config, location.layer),
            "context": context,
            ("early_rope" if attention.norm_after_rope and "query_norm" in location.names else "rope"): rope,
            "axial": axial_of(location, self.source, config, width) if self._positions else None,
            "position": position_of(location, config) if self._positions else "none",
            "modules": location.names,
            "pool": attention.pool,
            "learned": attention.order == "learned",
            "softcap": float(softcap) if softcap else None,
            "notes": (*self._notes, *layer_notes(location, self.source, config, part, shifted), *stored),
            **norms,
        }
        if kernel is None:
            return Layer(**facts)
        facts |= {"normed": kernel.normed, "query_down": kernel.query_down, "key_down": kernel.key_down}
        facts |= {"query_down_bias": kernel.query_down_bias, "key_down_bias": kernel.key_down_bias}
        layer = LatentLayer(**facts, eps=attention.latent_eps or epsilon(attention, config))
        return layer.rolled(layer.rope.dims) if attention.rope_last and layer.rope else layer

    def _rope(self, location: Location, config: Mapping[str, Any], width: int) -> Rope | None:
        """The rotation of a layer: as the config says, or by the frequencies that the file holds."""
        if "frequencies" not in location.names:
            return rope_of(location.attention, config, location.layer, width)
        frequencies = read_rows(self.source, location.names["frequencies"])
        return Rope(2 * len(frequencies), interleaved=location.attention.rope == "interleaved", frequencies=frequencies)

    def _config_of(self, location: Location) -> Mapping[str, Any]:
        return section(self.config, location.attention.config)

    def values(self, index: int) -> Values:
        """Value and output weights of layer `index`, with biases."""
        location, _ = self._locations[index]
        if "output" not in location.names or location.attention.order in ("latent", "query latent"):
            raise ValueError(f"{module_name(location)}: its output map is not read")
        moved: Values = self._placed(values(location, self.source, *self._read(index).weights.query.shape[:3]))
        return moved

    def _read_output(self, index: int) -> Form:
        carried = self.values(index)
        # queryᵀ·key = W_O·W_V.
        return Projections(carried.output, carried.value).form()


def _name(location: Location, part: str) -> str:
    return module_name(location) + (f" ({part})" if part else "")


def _kernels(located: list[Location], config: Mapping[str, Any]) -> Iterator[tuple[Location, str]]:
    """Each layer once; an MLA layer twice, for its two kernels, or for one if no dimension is rotated."""
    for location in located:
        latent = location.attention.order == "latent"
        rotated = section(config, location.attention.config).get("qk_rope_head_dim") != 0
        for part in ("nope", *(["rope"] if rotated else [])) if latent else (location.attention.part,):
            yield location, part


def _check_stated(location: Location, source: Source, config: Mapping[str, Any], weights: Projections) -> None:
    """Raise if the first layer has another head width, or another number of key heads, than the config says.

    Later layers may differ, as the global ones of Gemma 4 do.
    """
    if location.attention.order not in ("apart", "heads") or location.attention.kind != "self" or location.layer:
        return
    groups, shared, rank, _ = weights.query.shape
    for role, key, count, size in (
        ("query", location.attention.head_dim, groups * shared, rank),
        ("key", "num_key_value_heads", groups, groups),
    ):
        stated, name = config.get(key), location.names[role] + location.attention.weight
        if type(stated) is int and stated != size:
            raise ValueError(
                f"{name} of shape {tuple(source.shapes[name])} holds {count} heads of width {rank}, but the config's "
                f"{key} is {stated}"
            )


def _with_dim_scale(weights: Projections, factors: Tensor | float) -> Projections:
    """With learned factors of a query's dimensions."""
    if isinstance(factors, float):
        return weights
    bias = None if weights.query_bias is None else weights.query_bias * factors
    return replace(weights, query=weights.query * factors[:, None], query_bias=bias)


def _with_content_bias(location: Location, source: Source, weights: Projections) -> Projections:
    """With the bias that Transformer-XL adds to queries where they meet keys."""
    if "content_bias" not in location.names:
        return weights
    bias = read_rows(source, location.names["content_bias"]).reshape(weights.query.shape[:3])
    return replace(weights, query_bias=bias if weights.query_bias is None else weights.query_bias + bias)
