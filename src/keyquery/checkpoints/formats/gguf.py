"""GGUF files: quantised weights, dequantised one tensor at a time, under the names of this project's families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyquery.checkpoints.formats.gguf_config import config_of, plain_name, plain_names
from keyquery.checkpoints.formats.gguf_header import Header, read_header
from keyquery.support.extras import optional

# Factors by which rotary frequencies are divided, in the order of preference: they are tensors, not metadata.
FACTORS = ("rope_freqs.weight", "rope_factors_short.weight")

# MLA files keep the keys' up-projection by itself, and transposed.
SPLIT, WHOLE = ".self_attn.k_b_proj.weight", ".self_attn.kv_b_proj.weight"


class Gguf:
    """The tensors of a GGUF file. Needs the extra `gguf`."""

    def __init__(self, path: Path) -> None:
        self._library, self._path = _library(), path
        header = _header(path, skip="tokenizer.")
        fields = header.fields
        table = plain_names(self._library)
        self._tensors = {plain_name(name, table): entry for name, entry in header.tensors.items()}
        self.label = str(path)
        self.shapes = {name: entry.shape for name, entry in self._tensors.items()}
        try:
            self.config = config_of(fields, self.shapes, self._library)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        except (TypeError, ArithmeticError, AttributeError) as error:
            raise ValueError(f"{path}: its metadata cannot be used: {error}") from None
        self._split = {name.replace(SPLIT, WHOLE): name for name in self.shapes if name.endswith(SPLIT)}
        for name, part in self._split.items():  # (heads, latent, width), where other files have (heads·width, latent)
            heads, latent, width = (*self.shapes[part], 0, 0, 0)[:3]
            self.shapes[name] = (heads * width, latent)
        for name in FACTORS:
            if name in self.shapes:  # what a config.json calls LongRoPE
                factor = fields.get(f"{fields.get('general.architecture')}.rope.scaling.attn_factor", 1.0)
                factors = self.rows(name).flatten().tolist()
                self.config["rope_scaling"] = {
                    "rope_type": "longrope",
                    "short_factor": factors,
                    "attention_factor": factor,
                }
                break

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor, dequantised; a row is a whole number of quantised blocks."""
        if name in self._split:
            return self.rows(self._split[name]).mT.flatten(0, 1)[start:stop]
        entry, shape = self._tensors[name], self.shapes[name]
        count = shape[0] if len(shape) > 1 else 1  # a vector is one row of blocks, and read whole
        first, last, _ = slice(start, stop).indices(count) if len(shape) > 1 else (0, 1, 1)
        row = entry.size // max(count, 1)
        data = np.fromfile(self._path, np.uint8, max(last - first, 0) * row, offset=entry.start + first * row)
        if len(data) != max(last - first, 0) * row:
            raise ValueError(f"{self.label} ends early: it was changed while it was read")
        if len(data) == 0:
            return torch.empty(0, *shape[1:])
        try:  # in rows, of which the package takes a few at a time
            values = self._library.quants.dequantize(data.reshape(max(last - first, 1), -1), self._kind(entry.kind))
        except NotImplementedError:
            raise ValueError(f"{self.label}: {name} is stored as {self.stored(name)}, which is not read") from None
        tensor = torch.from_numpy(np.array(values, dtype=np.float32))
        return tensor.reshape(shape)[start:stop] if len(shape) == 1 else tensor.reshape(-1, *shape[1:])

    def stored(self, name: str) -> str:
        """How the file holds a tensor: F32, Q4_1 and the like."""
        return str(self._kind(self._tensors[self._split.get(name, name)].kind).name)

    def _kind(self, number: int) -> Any:
        return self._library.GGMLQuantizationType(number)


def words(path: Path) -> list[str] | None:
    """The texts of a GGUF file's tokens by id, where it has them."""
    field = _header(path).fields.get("tokenizer.ggml.tokens")
    return [str(word) for word in field] if isinstance(field, list) else None


def _library() -> Any:
    return optional("gguf", "a .gguf file")


def _header(path: Path, skip: str | None = None) -> Header:
    sizes = {int(kind): size for kind, size in _library().GGML_QUANT_SIZES.items()}
    try:
        return read_header(path, sizes, skip)
    except ValueError as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from None
