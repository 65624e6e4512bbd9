"""Timestamps: exact differences from an origin, masks, and typical scales."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float64, Shaped
from torch import Tensor

LOW = 2**32 - 1  # the lower half of a 64-bit integer


def elapsed_exactly(
    times: Shaped[Tensor, "*batch n"],
    origin: Shaped[Tensor, "*#batch"] | float | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
) -> tuple[Float64[Tensor, "*batch n"], Float64[Tensor, "*batch n"] | None]:
    """times − origin in float64, 0 where `mask` is False, and its rounding error; None if times are floats.

    Default origin: the first real time of each sequence. Integers are subtracted as integers, so that nanoseconds since
    1970 stay exact.
    """
    _check(times, mask)
    start = _first(times, mask) if origin is None else _origin(origin, times)
    since, rest = _difference(times, start.unsqueeze(-1))
    if mask is not None:
        since, rest = since.where(mask, 0.0), None if rest is None else rest.where(mask, 0.0)
    if not torch.compiler.is_compiling() and not since.is_meta and not bool(since.detach().sum().isfinite()):
        bad = int((~since.isfinite()).sum())
        where = "" if mask is None else " wherever mask is True"
        raise ValueError(f"times and origin must be finite{where}, got {bad} NaN or infinite of {since.numel()}")
    return since, rest


def _difference(times: Tensor, start: Tensor) -> tuple[Tensor, Tensor | None]:
    """times − start as the nearest float64 and the remainder; integers in halves of 32 bits, which cannot overflow."""
    if times.is_floating_point():
        return times - start.double(), None
    fraction = None
    if start.is_floating_point():
        whole = start.floor().clamp(-(2.0**63), 2.0**63 - 1024)
        fraction, start = start - whole, whole.long()
    times, start = times.long(), start.long()
    high = ((times >> 32) - (start >> 32)).double() * 2.0**32
    low = ((times & LOW) - (start & LOW)).double()
    low = low if fraction is None else low - fraction
    since = high + low
    return since, low - (since - high)


def spread(times: Shaped[Tensor, "*batch n"], mask: Bool[Tensor, "*batch n"] | None = None) -> tuple[float, float]:
    """Shortest and longest period that times resolve: twice a short gap, and twice the length of a sequence.

    The gap is the 5 % quantile of the positive inter-event times, the length the 95 % quantile.
    """
    elapsed_exactly(times, mask=mask)  # validates them
    times = times.detach()
    last = torch.inf if times.is_floating_point() else torch.iinfo(times.dtype).max
    ordered = (times if mask is None else times.masked_fill(~mask, last)).sort(-1).values
    count = times.new_full(times.shape[:-1], times.shape[-1], dtype=torch.int64) if mask is None else mask.sum(-1)
    # Neighbours are subtracted themselves: nanoseconds of years, counted from the first, would be rounded.
    between = _difference(ordered[..., 1:], ordered[..., :-1])[0]
    real = torch.arange(between.shape[-1], device=times.device) < count.unsqueeze(-1) - 1
    gaps = _positive(between.where(real, 0.0))
    if len(gaps) == 0:
        raise ValueError("times must hold a sequence with two different times, to initialise the periods from")
    end = ordered.gather(-1, (count - 1).clamp(min=0).unsqueeze(-1))
    spans = _positive(_difference(end, ordered[..., :1])[0])
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
    first = times.gather(-1, mask.int().argmax(-1, keepdim=True)).squeeze(-1)
    return first.where(mask.any(-1), torch.zeros_like(first))


def _origin(origin: Any, times: Tensor) -> Tensor:
    if isinstance(origin, Tensor):
        _check_dtype("origin", origin)
        batch = times.shape[:-1]
        fits = origin.ndim <= len(batch)
        fits = fits and all(a in (1, b) for a, b in zip(origin.shape[::-1], batch[::-1], strict=False))
        if not fits:
            raise ValueError(f"origin must be a number or {tuple(batch)}, got {tuple(origin.shape)}")
        return origin.to(times.device)
    if isinstance(origin, bool) or not isinstance(origin, Real):
        raise TypeError(f"origin must be a number or a tensor, got {type(origin).__name__}")
    if not isinstance(origin, Integral) or times.is_floating_point():
        return torch.tensor(origin, dtype=torch.float64, device=times.device)
    if not -(2**63) <= int(origin) < 2**63:
        raise ValueError(f"origin must fit into 64 bits, as times do, got {origin}")
    return torch.tensor(int(origin), device=times.device)


def _check(times: Tensor, mask: Tensor | None) -> None:
    if not isinstance(times, Tensor):
        raise TypeError(f"times must be a tensor, float64 or integers, got {type(times).__name__}")
    _check_dtype("times", times)
    if times.ndim == 0:
        raise ValueError("times must be (..., n), got a single number")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        mask_dtype = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"mask must be bool, True for real times, got {mask_dtype}")
    if mask.shape != times.shape:
        raise ValueError(f"mask must be {tuple(times.shape)}, as times are, got {tuple(mask.shape)}")


def _check_dtype(name: str, value: Tensor) -> None:
    """Raise for float32 and shorter: the precision they have lost cannot be recovered."""
    if value.dtype not in (torch.float64, torch.int64, torch.int32):
        raise TypeError(
            f"{name} must be float64 or integers, got {value.dtype}: float32 cannot resolve Unix seconds that are less "
            "than 128 s apart; convert before anything is computed, or subtract an origin and call .double()"
        )
