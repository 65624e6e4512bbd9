"""JSON data in smaller files: compressed, or with its long lists of numbers as one float64 tensor or Parquet file.

All are exact: what is read is what was written.
"""

from __future__ import annotations

import base64
import io
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keyquery.support.bounded_json import parse_json
from keyquery.support.extras import optional
from keyquery.support.files import MIB, WHOLE, decompressed_limit, regular

SUFFIXES = (".json", ".json.xz", ".parquet", ".safetensors")
KEY = "reading"  # of the metadata of Parquet and safetensors files
NUMBERS = "$numbers"  # stands for a list of so many numbers of the tensor
SHORTEST = 8  # shorter lists stay in the JSON
PRESET = 3  # of xz: higher ones take much longer for a few per cent


def suffix_of(path: str | Path) -> str:
    """The suffix that says how a file is stored; .json for any other."""
    name = str(path).lower()
    return next((suffix for suffix in reversed(SUFFIXES) if name.endswith(suffix)), ".json")


def packed(text: str, records: list[dict[str, Any]], suffix: str) -> bytes:
    """The content of a file of JSON data; `records` are the rows that a Parquet file shows to other programs."""
    if suffix == ".json":
        return text.encode() + b"\n"
    if suffix == ".json.xz":
        return lzma.compress(text.encode() + b"\n", preset=PRESET)
    if suffix == ".parquet":
        arrow, parquet = (optional(name, ".parquet") for name in ("pyarrow", "pyarrow.parquet"))
        whole = base64.b64encode(lzma.compress(text.encode(), preset=PRESET))
        target = io.BytesIO()
        table = arrow.Table.from_pylist(records).replace_schema_metadata({KEY: whole})
        parquet.write_table(table, target, compression="zstd")
        return target.getvalue()
    from safetensors.torch import save  # only where it is needed: results are opened more often than stored

    numbers: list[float] = []
    skeleton = json.dumps(_taken(json.loads(text), numbers), ensure_ascii=False, separators=(",", ":"))
    return save({"numbers": torch.tensor(numbers, dtype=torch.float64)}, {KEY: skeleton})


def unpacked(path: str | Path, suffix: str) -> Any:
    """The data of a .parquet or .safetensors file, plain; ValueError if it holds none."""
    file = regular(path)
    if suffix == ".parquet":
        return parse_json(_from_parquet(file), finite=True)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            text, numbers = (opened.metadata() or {}).get(KEY), opened.get_tensor("numbers")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from None
    if text is None or numbers.dtype != torch.float64 or numbers.ndim != 1 or not bool(numbers.isfinite().all()):
        raise ValueError(f"{path} holds no reading")
    source = _Source(numbers.numpy())
    data = _restored(parse_json(text, finite=True), source)
    if source.at != len(numbers):
        raise ValueError(f"{path} holds numbers that belong nowhere")
    return data


def _from_parquet(path: Path) -> str:
    parquet, arrow = optional("pyarrow.parquet", ".parquet"), optional("pyarrow", ".parquet")
    try:
        found = (parquet.read_schema(path).metadata or {}).get(KEY.encode())
        raw = b"" if found is None else base64.b64decode(found, validate=True)
        decoder = lzma.LZMADecompressor(memlimit=256 * MIB)
        data = decoder.decompress(raw, max_length=min(decompressed_limit(len(raw)), WHOLE))
    except (OSError, ValueError, arrow.ArrowException, lzma.LZMAError) as error:
        raise ValueError(f"{path} is not a Parquet file with a reading: {error}") from None
    if found is None or not decoder.eof:
        raise ValueError(f"{path} is not a Parquet file with a reading")
    return data.decode()


class _Source:
    """Numbers that are taken in order, each once, so that a small file cannot stand for a large one."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers, self.at = numbers, 0

    def take(self, count: Any) -> list[float]:
        if type(count) is not int or not 0 <= count <= len(self.numbers) - self.at:
            raise ValueError(f"not a reading: {count!r:.40} numbers are asked for, which it does not hold")
        self.at += count
        taken: list[float] = self.numbers[self.at - count : self.at].tolist()
        return taken


def _taken(value: Any, numbers: list[float]) -> Any:
    """The data with its long lists of floats moved to `numbers`."""
    if isinstance(value, dict):
        return {key: _taken(part, numbers) for key, part in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) >= SHORTEST and set(map(type, value)) == {float}:
        numbers += value
        return {NUMBERS: len(value)}
    return [_taken(part, numbers) for part in value]


def _restored(value: Any, source: _Source) -> Any:
    if isinstance(value, dict):
        if list(value) == [NUMBERS]:
            return source.take(value[NUMBERS])
        return {key: _restored(part, source) for key, part in value.items()}
    return [_restored(part, source) for part in value] if isinstance(value, list) else value
