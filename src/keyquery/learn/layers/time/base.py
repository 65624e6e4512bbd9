"""Time encodings: features whose inner product, the time kernel ψ, depends only on the time between two events."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor, nn

from keyquery.learn.layers.time.timestamps import elapsed, spread
from keyquery.reading import Reading, digests, provenance

MIN_SHARE = 1e-30  # smallest share: the root has no gradient at 0
TURN = 2 * math.pi
FIRST = (1.0, 1e4)  # shortest and longest initial period, before `see`
POINTS = 1001  # default number of lags of a reading


@dataclass(frozen=True, kw_only=True)
class TimeKernel(Reading, kind="time kernel"):
    """ψ at some lags, its spectrum, and with per-head weights the score term ψ_h of each head."""

    units: ClassVar[Mapping[str, str]] = {
        "lags": "time between two events, in the unit of the times",
        "values": "ψ(lag), 1 at lag 0",
        "heads": "added to the score of each head",
        "frequency": "radians per unit of time",
        "share": "of ψ(0)",
    }

    lags: list[float]
    values: list[float]
    spectrum: list[dict[str, float]]  # frequency and share of each component
    heads: list[list[float]] | None = None

    def records(self) -> list[dict[str, Any]]:
        """One row per lag."""
        heads = {f"head_{number}": row for number, row in enumerate(self.heads or [])}
        columns = {"lag": self.lags, "psi": self.values, **heads}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class TimeCode(nn.Module, ABC):
    """Φ(t) = [√w₁ cos ω₁t, √w₁ sin ω₁t, …]: ⟨Φ(t), Φ(t')⟩ = ψ(t − t') = Σᵢ wᵢ cos ωᵢ(t − t'), Σ wᵢ = 1, wᵢ ≥ 0.

    Cosine and sine share ω and w, so that ψ depends only on the lag for all parameter values. Parameters are
    dimensionless; quantities with a unit are float64 buffers, which keep their precision in any dtype. Φ(t) has `dim`
    entries, two per frequency.
    """

    base: Tensor  # the constants with a unit
    sampled = False  # whether frequencies are resampled in training

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self._held = False

    @abstractmethod
    def frequencies(self) -> Float64[Tensor, " f"]:
        """ω: those of the last `encode` in training, the fixed ones otherwise."""

    @abstractmethod
    def shares(self) -> Float64[Tensor, " f"]:
        """w, which sum to 1."""

    @abstractmethod
    def _base(self, shortest: float, longest: float) -> Tensor:
        """The constants with a unit, of frequencies between two periods."""

    @torch.no_grad()
    def see(self, times: Shaped[Tensor, "*batch n"], mask: Bool[Tensor, "*batch n"] | None = None) -> None:
        """Initialise the frequencies from data: periods from twice an inter-event time to twice a sequence length."""
        self.base.copy_(self._base(*spread(times, mask)))

    def encode(
        self,
        times: Shaped[Tensor, "*batch n"],
        origin: Shaped[Tensor, "*#batch"] | float | None = None,
        mask: Bool[Tensor, "*batch n"] | None = None,
        gain: float = 1.0,
    ) -> Float[Tensor, "*batch n dim"]:
        """gain·Φ(times − origin), in the module's dtype; 0 where `mask` is False.

        Times are float64 or integers; phases are float64, reduced to one period before the cast. The default origin is
        the first real time of each sequence; encodings are comparable between calls only with the same origin.
        """
        if self.training and not self._held:
            self._draw()
        wide = torch.promote_types(self.dtype, torch.float32)
        sizes = (gain * self.shares().clamp(min=MIN_SHARE).sqrt()).to(wide)
        turns = elapsed(times, origin, mask).unsqueeze(-1) * (self.frequencies() / TURN)
        angles = ((turns - turns.round()) * TURN).to(wide)
        code = torch.stack((angles.cos() * sizes, angles.sin() * sizes), -1).flatten(-2).to(self.dtype)
        return code if mask is None else code.where(mask.unsqueeze(-1), 0.0)

    forward = encode

    def kernel(self, lags: Shaped[Tensor, "*lags"]) -> Float64[Tensor, "*lags"]:
        """ψ(lags) in float64, with the current frequencies."""
        return (lags.double().unsqueeze(-1) * self.frequencies()).cos() @ self.shares()

    def time_kernel(self, lags: Shaped[Tensor, " lags"] | None = None) -> TimeKernel:
        """ψ over lags as a Reading with a plot. Default lags: up to half of the longest period."""
        with torch.no_grad():
            frequencies = self.frequencies()
            if lags is None:
                lowest = max(float(frequencies.abs().min()), 1e-6 * float(frequencies.abs().max()), 1e-300)
                lags = torch.linspace(0, math.pi / lowest, POINTS, dtype=torch.float64)
            lags = torch.as_tensor(lags, dtype=torch.float64, device=frequencies.device)
            if lags.ndim != 1 or len(lags) == 0 or not lags.isfinite().all():
                raise ValueError(f"lags must be finite numbers (lags,), at least one, got {lags}")
            values = self.kernel(lags)
            both = zip(frequencies.tolist(), self.shares().tolist(), strict=True)
            spectrum = [{"frequency": frequency, "share": share} for frequency, share in both]
        described = f"{type(self).__name__}({self.extra_repr()})"
        source = provenance(code=described, tensors=digests(self.state_dict()))
        return TimeKernel(lags=lags.tolist(), values=values.tolist(), spectrum=spectrum, provenance=source)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Use one draw of frequencies for all calls inside, such as queries and keys encoded separately."""
        if self.training and not self._held:
            self._draw()
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters and the encodings."""
        return next(self.parameters()).dtype

    def _draw(self) -> None:
        """Resample the frequencies."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # A year in seconds does not fit into float16, nor a week into bfloat16: buffers stay float64.
        exact = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self
