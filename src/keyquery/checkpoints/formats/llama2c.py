"""Files of llama2.c: seven integers, then float32 weights, exposed under the names of a Llama file."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

HEADER = struct.Struct("<7i")  # dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len
MAGIC = b"24ka"  # of later versions, which begin with it
MAX_SIZE = 2**20  # of any of the seven numbers


class Llama2c:
    """The attention weights of a llama2.c file, version 0, lazily loaded."""

    def __init__(self, path: Path, numbers: tuple[int, ...]) -> None:
        dim, _, layers, heads, keys, vocabulary, length = numbers
        self.label, self._path = str(path), path
        self.config: dict[str, Any] = {
            "model_type": "llama2.c",
            "hidden_size": dim,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": keys,
            "vocab_size": abs(vocabulary),
            "max_position_embeddings": length,
            "rope_theta": 10000.0,  # a constant of its runtime, like the epsilon of its norms
            "rms_norm_eps": 1e-5,
        }
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._starts: dict[str, int] = {}
        offset = HEADER.size
        for name, shape in _stored(numbers):
            for layer in range(layers if "{layer}" in name else 1):
                full = name.format(layer=layer)
                self.shapes[full], self._starts[full] = shape, offset
                offset += 4 * math.prod(shape)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor."""
        shape, row = self.shapes[name], 4 * math.prod(self.shapes[name][1:])
        rows = range(*slice(start, stop).indices(shape[0]))
        data = np.fromfile(self._path, "<f4", len(rows) * row // 4, offset=self._starts[name] + rows.start * row)
        if len(data) != len(rows) * row // 4:
            raise ValueError(f"{self.label} ends early: it was changed while it was read")
        return torch.from_numpy(data.astype(np.float32, copy=False)).reshape(len(rows), *shape[1:])


def open_llama2c(path: Path) -> Llama2c | None:
    """The file as a llama2.c model, or None if its header is not one."""
    with path.open("rb") as file:
        start = file.read(HEADER.size)
    if start[:4] == MAGIC:
        version = struct.unpack("<i", start[4:8])[0] if len(start) >= 8 else "?"
        raise ValueError(f"{path} is a llama2.c file of version {version}, which is not read: export it as version 0")
    if len(start) < HEADER.size or start[:2] in (b"PK", b"\x80\x02"):
        return None
    numbers = HEADER.unpack(start)
    dim, _, _, heads, keys, vocabulary, _ = numbers
    if not all(0 < abs(number) <= MAX_SIZE for number in numbers) or min((*numbers[:5], numbers[6])) < 0:
        return None
    if dim % heads or heads % keys:
        return None
    # Besides what is named: two more norms, three maps of the MLP, the rotations, and the output unless it is shared.
    _, hidden, layers, _, _, _, length = numbers
    rest = layers * dim + 3 * layers * dim * hidden + dim + length * (dim // heads)
    rest += 0 if vocabulary > 0 else -vocabulary * dim
    named = sum(math.prod(shape) * (layers if "{layer}" in name else 1) for name, shape in _stored(numbers))
    size, expected = path.stat().st_size, HEADER.size + 4 * (named + rest)
    if size != expected:
        if abs(size - expected) < max(size, expected) // 2:
            raise ValueError(f"{path} begins like a llama2.c file, but has {size} bytes; its header says {expected}")
        return None
    return Llama2c(path, numbers)


def _stored(numbers: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the first tensors in file order; those of all layers are stacked."""
    dim, _, _, heads, keys, vocabulary, _ = numbers
    wide = dim // heads * keys
    return [
        ("embed_tokens.weight", (abs(vocabulary), dim)),
        ("layers.{layer}.input_layernorm.weight", (dim,)),
        ("layers.{layer}.self_attn.q_proj.weight", (dim, dim)),
        ("layers.{layer}.self_attn.k_proj.weight", (wide, dim)),
        ("layers.{layer}.self_attn.v_proj.weight", (wide, dim)),
        ("layers.{layer}.self_attn.o_proj.weight", (dim, dim)),
    ]
