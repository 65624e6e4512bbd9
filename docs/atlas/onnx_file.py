"""The backbone of an ONNX file of DINOv2 as tensors with the names of transformers, by the few fields that it takes.

An ONNX file is a protocol buffer: fields of a number and a value each. Of the graph (field 7) are read the tensors
(5: sizes 1, name 8, bytes 9) and the nodes (1: inputs 1, name 3), which say what nameless matrices are for.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

PREFIX, PLACES = "backbone.", "embeddings.position_embeddings"
FLOAT = 1  # the kind of number, field 2 of a tensor


def read_backbone(path: Path) -> dict[str, Tensor]:
    """Weights by name; matrices lie transposed in the file, and position embeddings in two pieces."""
    graph = next(value for field, value in _fields(memoryview(path.read_bytes())) if field == 7)
    tensors = dict(_tensor(value) for field, value in _fields(graph) if field == 5)
    found = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    for field, value in _fields(graph):
        inputs, name = _node(value) if field == 1 else ([], "")
        if name.startswith(f"/{PREFIX[:-1]}/") and name.endswith("/MatMul") and inputs[1] in tensors:
            called = name.split("/", 2)[2].removesuffix("/MatMul").replace("/", ".")
            found[f"{called}.weight"] = tensors[inputs[1]].mT.contiguous()
    width = found["embeddings.cls_token"].shape[-1]
    pieces = [t for name, t in tensors.items() if name.startswith("onnx::") and t.ndim == 3 and t.shape[-1] == width]
    return found | {PLACES: torch.cat(sorted(pieces, key=len_of), dim=1)}


def len_of(tensor: Tensor) -> int:
    """How many places a piece of the position embeddings is for: that of the first token comes first."""
    return tensor.shape[1]


def _tensor(data: memoryview) -> tuple[str, Tensor]:
    sizes: list[int] = []
    name, kind, raw = "", 0, b""
    for field, value in _fields(data):
        if field == 1:
            sizes += [value] if isinstance(value, int) else _numbers(value)
        elif field == 2:
            kind = value
        elif field == 8:
            name = bytes(value).decode()
        elif field == 9:
            raw = bytes(value)
    if kind != FLOAT or len(raw) != 4 * prod(sizes):
        return name, torch.empty(0)
    return name, torch.frombuffer(bytearray(raw), dtype=torch.float32).view(sizes)


def _node(data: memoryview) -> tuple[list[str], str]:
    parts = [(field, bytes(value).decode()) for field, value in _fields(data) if field in (1, 3)]
    return [text for field, text in parts if field == 1], next((text for field, text in parts if field == 3), "")


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Every field of a message: whole numbers as they are, all else as bytes."""
    at = 0
    while at < len(data):
        tag, at = _number(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _number(data, at)
            yield tag >> 3, value
            continue
        size, at = _number(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        yield tag >> 3, data[at : at + size]
        at += size


def _numbers(data: memoryview) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _number(data, at)
        found.append(value)
    return found


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """A whole number, seven bits a byte, the lowest first; and where the next field begins."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
