"""GGUF files: quantised weights, dequantised one tensor at a time, under the names of this project's families."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyquery.checkpoints.formats.gguf_header import Header, read_header
from keyquery.support.extras import optional

# Architectures whose converter permutes the rows of q and k, so that rotary pairs are neighbours: (2i, 2i + 1).
INTERLEAVED = {"llama"}
# Layers of these see a window, all but every so many-th.
WINDOWS = {"gemma2": 2, "gemma3": 6, "phi3": None}
# Gemma's largest models divide their scores by √(width / heads), the others by √(head width): by number of layers.
BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}
# Factors by which rotary frequencies are divided, in the order of preference: they are tensors, not metadata.
FACTORS = ("rope_freqs.weight", "rope_factors_short.weight")

# GGUF's names of a block's tensors, and of the rest, as a Llama file has them.
BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
REST = {"token_embd": "embed_tokens"}


class Gguf:
    """The tensors of a GGUF file. Needs the extra `gguf`."""

    def __init__(self, path: Path) -> None:
        self._library, self._path = _library(), path
        header = _header(path, skip="tokenizer.")
        fields = header.fields
        self._tensors = {_name(name): entry for name, entry in header.tensors.items()}
        self.label = str(path)
        self.shapes = {name: entry.shape for name, entry in self._tensors.items()}
        try:
            self.config = _config(fields, len(self.shapes))
        except (TypeError, ArithmeticError) as error:
            raise ValueError(f"{path}: its metadata cannot be used: {error}") from None
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
        found = torch.from_numpy(np.array(values, dtype=np.float32))
        return found.reshape(shape)[start:stop] if len(shape) == 1 else found.reshape(-1, *shape[1:])

    def stored(self, name: str) -> str:
        """How the file holds a tensor: F32, Q4_1 and the like."""
        return str(self._kind(self._tensors[name].kind).name)

    def _kind(self, number: int) -> Any:
        return self._library.GGMLQuantizationType(number)


def words(path: Path) -> list[str] | None:
    """The texts of a GGUF file's tokens by id, where it has them."""
    found = _header(path).fields.get("tokenizer.ggml.tokens")
    return [str(word) for word in found] if isinstance(found, list) else None


def _library() -> Any:
    return optional("gguf", "a .gguf file")


def _header(path: Path, skip: str | None = None) -> Header:
    sizes = {int(kind): size for kind, size in _library().GGML_QUANT_SIZES.items()}
    try:
        return read_header(path, sizes, skip)
    except ValueError as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from None


def _name(name: str) -> str:
    """A tensor's name as a Llama file has it; others stay as they are."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK:
        return f"layers.{parts[1]}.{BLOCK[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in REST:
        return f"{REST[parts[0]]}.{parts[1]}"
    return name


def _config(fields: Mapping[str, Any], tensors: int) -> dict[str, Any]:
    """GGUF's metadata in the words of a config.json; a layer has a tensor at least."""
    architecture = fields.get("general.architecture", "")

    def said(key: str) -> Any:
        return fields.get(f"{architecture}.{key}")

    heads, layers, width = said("attention.head_count"), said("block_count"), said("embedding_length")
    if isinstance(layers, int) and not 0 <= layers <= tensors:
        raise ValueError(f"its metadata say {layers} layers, and it holds {tensors} tensors")
    config = {
        "model_type": f"gguf-{architecture}",
        "max_position_embeddings": said("context_length"),
        "rms_norm_eps": said("attention.layer_norm_rms_epsilon"),
        "sliding_window": said("attention.sliding_window"),
        "query_pre_attn_scalar": width / heads if (architecture, layers) in BY_WIDTH else None,
        "rope_local_base_freq": 10000.0 if architecture == "gemma3" else None,  # a constant of its runtime
        "num_attention_heads": heads,
        "num_key_value_heads": said("attention.head_count_kv"),
        "head_dim": said("attention.key_length"),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "rope_theta": said("rope.freq_base"),
        "rotary_dim": said("rope.dimension_count"),
        "rope_interleave": architecture in INTERLEAVED,
    }
    scaling, factor = said("rope.scaling.type"), said("rope.scaling.factor")
    if scaling and scaling != "none":
        config["rope_scaling"] = {"rope_type": scaling, "factor": factor}
        if length := said("rope.scaling.original_context_length"):
            config["rope_scaling"]["original_max_position_embeddings"] = length
    if architecture in WINDOWS and layers:
        every = WINDOWS[architecture] or layers + 1
        full = [layer % every == every - 1 for layer in range(layers)]
        config["layer_types"] = ["full_attention" if whole else "sliding_attention" for whole in full]
    return {key: value for key, value in config.items() if value is not None}
