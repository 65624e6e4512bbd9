"""GGUF files: quantised weights, dequantised one tensor at a time, under the names of this project's families."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Architectures whose converter permutes the rows of q and k, so that rotary pairs are neighbours: (2i, 2i + 1).
INTERLEAVED = {"llama", "mistral", "granite", "deci", "baichuan", "internlm2", "minicpm", "xverse", "olmo", "command-r"}

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
        try:
            self._library = import_module("gguf")
        except ImportError:
            raise ImportError("a .gguf file needs the gguf package: pip install 'keyquery[gguf]'") from None
        try:
            reader = self._library.GGUFReader(path)
            fields = {name: _plain(field) for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
            self._tensors = {_name(tensor.name): tensor for tensor in reader.tensors}
        except Exception as error:  # the package raises whatever a broken file makes it stumble over
            raise ValueError(f"{path} is not a readable GGUF file: {error}") from None
        self.label = str(path)
        self.config = _config(fields)
        self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor, dequantised; a row is a whole number of quantised blocks."""
        tensor = self._tensors[name]
        data = tensor.data[start:stop]
        values = self._library.quants.dequantize(data, tensor.tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32)).reshape(-1, *self.shapes[name][1:])


def words(path: Path) -> list[str] | None:
    """The texts of a GGUF file's tokens by id, where it has them."""
    found = import_module("gguf").GGUFReader(path).fields.get("tokenizer.ggml.tokens")
    return None if found is None else [str(word) for word in found.contents()]


def _name(name: str) -> str:
    """A tensor's name as a Llama file has it; others stay as they are."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK:
        return f"layers.{parts[1]}.{BLOCK[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in REST:
        return f"{REST[parts[0]]}.{parts[1]}"
    return name


def _plain(field: Any) -> Any:
    value = field.contents()
    return value.tolist() if isinstance(value, np.generic) else value


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF's metadata in the words of a config.json."""
    architecture = fields.get("general.architecture", "")

    def said(key: str) -> Any:
        return fields.get(f"{architecture}.{key}")

    config = {
        "model_type": f"gguf-{architecture}",
        "num_attention_heads": said("attention.head_count"),
        "num_key_value_heads": said("attention.head_count_kv"),
        "head_dim": said("attention.key_length"),
        "hidden_size": said("embedding_length"),
        "num_hidden_layers": said("block_count"),
        "rope_theta": said("rope.freq_base"),
        "rotary_dim": said("rope.dimension_count"),
        "rope_interleave": architecture in INTERLEAVED,
    }
    scaling, factor = said("rope.scaling.type"), said("rope.scaling.factor")
    if scaling and scaling != "none":
        config["rope_scaling"] = {"rope_type": scaling, "factor": factor}
    return {key: value for key, value in config.items() if value is not None}
