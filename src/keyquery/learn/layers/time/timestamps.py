"""Timestamps: differences from an origin, masks, and typical scales."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float64, Shaped
from torch import Tensor


def elapsed(
    times: Shaped[Tensor, "*batch n"],
    origin: Shaped[Tensor, "*#batch"] | float | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
) -> Float64[Tensor, "*batch n"]:
    """times − origin in float64, 0 where `mask` is False; integers are subtracted as integers, such as nanoseconds.

    Default origin: the first real time of each sequence.
    """
    _check_dtype("times", times)
    if mask is not None and (mask.dtype != torch.bool or mask.shape != times.shape):
        received = f"{mask.dtype} {tuple(mask.shape)}"
        raise ValueError(f"mask must be bool {tuple(times.shape)}, True for real times, got {received}")
    start = _first(times, mask) if origin is None else _origin(origin, times)
    since = (times - start.unsqueeze(-1)).double()
    if mask is not None:
        since = since.where(mask, 0.0)
    if not torch.compiler.is_compiling() and not since.is_meta and not bool(since.detach().sum().isfinite()):
        bad = int((~since.isfinite()).sum())
        where = "" if mask is None else " wherever mask is True"
        raise ValueError(f"times and origin must be finite{where}, got {bad} NaN or infinite of {since.numel()}")
    return since


def spread(times: Shaped[Tensor, "*batch n"], mask: Bool[Tensor, "*batch n"] | None = None) -> tuple[float, float]:
    """Shortest and longest period that times resolve: twice a short gap, and twice the length of a sequence.

    The gap is the 5 % quantile of the positive inter-event times, the length the 95 % quantile.
    """
    since = elapsed(times, mask=mask)
    real = torch.ones_like(since, dtype=torch.bool) if mask is None else mask
    ordered = since.detach().masked_fill(~real, torch.inf).sort(-1).values
    gaps = _positive(ordered.diff())
    if len(gaps) == 0:
        raise ValueError("times must hold a sequence with two different times, to initialise the periods from")
    spans = _positive(ordered.masked_fill(ordered.isinf(), -torch.inf).amax(-1) - ordered[..., 0])
    shortest, longest = 2 * float(np.quantile(gaps, 0.05)), 2 * float(np.quantile(spans, 0.95))
    return shortest, max(longest, shortest)


def spaced(shortest: float, longest: float, count: int) -> Float64[Tensor, " count"]:
    """Log-spaced periods from the shortest to the longest; a single one is the geometric mean."""
    if count == 1:
        return torch.tensor([math.sqrt(shortest * longest)], dtype=torch.float64)
    return torch.linspace(math.log(shortest), math.log(longest), count, dtype=torch.float64).exp()


def _positive(values: Tensor) -> Float64[np.ndarray, " n"]:
    return values[values.isfinite() & (values > 0)].cpu().numpy()


def _first(times: Tensor, mask: Tensor | None) -> Tensor:
    """Each sequence's first real time; 0 where it has none."""
    if times.shape[-1] == 0:
        return times.new_zeros(times.shape[:-1])
    if mask is None:
        return times[..., 0]
    return times.gather(-1, mask.int().argmax(-1, keepdim=True)).squeeze(-1).where(mask.any(-1), 0)


def _origin(origin: Any, times: Tensor) -> Tensor:
    if isinstance(origin, Real):
        whole = isinstance(origin, int) and not times.is_floating_point()
        return torch.tensor(origin, dtype=torch.int64 if whole else torch.float64, device=times.device)
    _check_dtype("origin", origin)
    return origin.to(times.device).expand(times.shape[:-1])


def _check_dtype(name: str, value: Any) -> None:
    """Raise for float32 and shorter."""
    dtype = getattr(value, "dtype", type(value).__name__)
    if dtype not in (torch.float64, torch.int64, torch.int32):
        raise TypeError(
            f"{name} must be a tensor of float64 or integers, got {dtype}: float32 cannot tell Unix seconds less than "
            "128 s apart; convert before anything is computed, or subtract an origin and call .double()"
        )
