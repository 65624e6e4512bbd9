"""The device and the dtype that a computation was asked to run in."""

from __future__ import annotations

import os
from typing import Any

import torch

from keyquery.support.checks import check_choice, environment_count

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def pick_device(device: Any) -> str:
    """Resolve a device: "auto" is a GPU if available; under torchrun each process has its own."""
    rank = f":{environment_count('LOCAL_RANK', 0)}" if os.environ.get("LOCAL_RANK") else ""
    try:
        auto = f"cuda{rank}" if torch.cuda.is_available() else "cpu"
        resolved = torch.device({"auto": auto, "cuda": f"cuda{rank}"}.get(str(device), device))
        known = resolved.type in ("cpu", "cuda")
    except (RuntimeError, TypeError):
        known = False
    if not known:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:0', 'cuda:1', …, got {device!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if resolved.type == "cuda" and (resolved.index or 0) >= count:
        reason = f"there are only {count} GPUs here" if count else "there is no GPU here"
        raise ValueError(f"device {str(device)!r}: {reason}")
    return str(resolved)


def pick_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Resolve a floating dtype by its name; None: as the weights are stored."""
    name = str(dtype).removeprefix("torch.")
    if dtype is not None:
        check_choice("dtype", name, DTYPES)
    return None if dtype is None else DTYPES[name]
