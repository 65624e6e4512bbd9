"""Continuous-time attention over events: type and time of an event both enter the score."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from keyquery.forms import Form
from keyquery.layers.attention import Attention
from keyquery.layers.cache import Cache
from keyquery.layers.fused import as_wide
from keyquery.learn.layers.time.encodings import TimeCode, TimeKernel
from keyquery.support.checks import check_choice

WAYS = ("concatenated", "additive", "interaction")
POSITIVE = ("psd", "rbf")  # kernels that stay positive only if the weights of the time kernel are


class TimeAttention(nn.Module):
    """Continuous-time self-attention of events x at times t, with a time encoding Φ(t) of dimension T.

    | how | scores | time enters by |
    |---|---|---|
    | concatenated | z = [x; √T·Φ(t)] through any kernel of `kq.Attention`, as published | t |
    | additive | xᵀMx'/√r + ψ_h(t − t'), ψ_h(t) = Σᵢ a_hi wᵢ cos ωᵢt with a learned a per head | t − t' only |
    | interaction | z = relu(W[x; √T·Φ(t)]) through any kernel: events and times interact before the score | t |

    Only "additive" scores are invariant to a shift of all times. By default times are measured from the first event of
    each sequence, which makes all three invariant; with an explicit `origin` they are not.

    Parameters
    ----------
    dim, heads
        Width of the events, and number of heads.
    time
        Time encoding, a `kq.MercerTime` or `kq.BochnerTime`.
    how
        One of the table. Default: "concatenated".
    kernel
        Any kernel of `kq.Attention`. Default: "general".
    **attention
        Other options of `kq.Attention`.

    See Also
    --------
    MercerTime, BochnerTime : time encodings.
    EventModel : an estimator built from it.

    Examples
    --------
    >>> layer = kq.TimeAttention(16, heads=2, time=kq.MercerTime(8, degree=2, periods=2), how="additive")
    >>> times = torch.tensor([[0.0, 0.5, 0.7, 3.0]], dtype=torch.float64)
    >>> layer(torch.randn(1, 4, 16), times, is_causal=True).shape
    torch.Size([1, 4, 16])
    """

    def __init__(
        self, dim: int, heads: int, time: TimeCode, how: str = "concatenated", kernel: str = "general", **attention: Any
    ) -> None:
        super().__init__()
        check_choice("how", how, WAYS)
        if not isinstance(time, TimeCode):
            raise TypeError(f"time must be a kq.BochnerTime or kq.MercerTime, got {type(time).__name__}")
        self.dim, self.heads, self.how, self.time = dim, heads, how, time
        factory: dict[str, Any] = {name: attention.get(name) for name in ("device", "dtype")}
        self.mix = nn.Linear(dim + time.dim, dim, **factory) if how == "interaction" else None
        if how == "interaction":
            self.joint = Attention(dim, heads, kernel, **attention)
        else:
            kind = _Concatenated if how == "concatenated" else _Additive
            self.joint = kind(dim, heads, time, kernel=kernel, **attention)

    def forward(
        self,
        x: Float[Tensor, "batch n dim"],
        times: Shaped[Tensor, "batch n"],
        mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        origin: Shaped[Tensor, "#batch"] | float | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch n dim"]:
        """Attend within each sequence of events x (batch, n, dim) at times (batch, n), as float64 or integers.

        With `is_causal`, event i sees events j ≤ i in the order of the rows, whatever their times: sort by time. `mask`
        and `cache` are as in `kq.Attention`. `origin` is the zero of time, by default the first event of each sequence;
        a cache needs one, the same in every call.
        """
        if cache is not None and origin is None:
            raise ValueError("a cache needs an origin: otherwise each call would measure time from its own first event")
        return self.joint(self.join(x, times, mask, origin), mask, is_causal, cache=cache)

    def join(
        self,
        x: Float[Tensor, "batch n dim"],
        times: Shaped[Tensor, "batch n"],
        mask: Bool[Tensor, "..."] | None = None,
        origin: Shaped[Tensor, "#batch"] | float | None = None,
    ) -> Float[Tensor, "batch n width"]:
        """The input of the inner attention `joint`, which `form` acts on: [x; Φ(t)], or relu(W[x; Φ(t)])."""
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (batch, n, {self.dim}), got {tuple(x.shape)}")
        if (shape := tuple(getattr(times, "shape", ()))) != x.shape[:2]:
            raise ValueError(f"times must be {tuple(x.shape[:2])}, one per event of x, got {shape}")
        real = mask if mask is not None and mask.ndim == 2 else None
        gain = 1.0 if self.how == "additive" else math.sqrt(self.time.dim)  # entries of size 1, as events have
        z = torch.cat((x, self.time.encode(times, origin, real, gain).to(x.dtype)), -1)
        if self.mix is None:
            return z  # padding is masked by the inner attention
        return self.mix(z if real is None else z.where(real.unsqueeze(-1), 0.0)).relu()

    def form(self) -> Form:
        """The QK form of each head, acting on the output of `join`: events and times together.

        For `additive` it has two blocks, M and √r·diag(a) for the cosines and sines.
        """
        return self.joint.form()

    def time_kernel(self, lags: Shaped[Tensor, " lags"] | None = None) -> TimeKernel:
        """The time kernel ψ as a Reading with a plot; for `additive` also ψ_h of each head."""
        reading = self.time.time_kernel(lags)
        if not isinstance(self.joint, _Additive):
            return reading
        with torch.no_grad():
            phases = torch.tensor(reading.lags, dtype=torch.float64)[:, None] * self.time.frequencies().cpu()
            added = phases.cos() @ (self.joint.weights().double() * self.time.shares()).cpu().mT
        return replace(reading, heads=added.mT.tolist())

    def extra_repr(self) -> str:
        """For the repr of the module."""
        return f"how={self.how!r}"


class _Concatenated(Attention):
    """Attention over [x; Φ(t)] that writes to x alone, with heads of the width that the events alone would have."""

    def __init__(self, dim: int, heads: int, time: TimeCode, **options: Any) -> None:
        if options.get("head_dim") is None and dim % heads:
            raise ValueError(f"heads must divide dim unless head_dim is set: {heads} does not divide {dim}")
        width = options.get("head_dim") or dim // heads
        super().__init__(dim + time.dim, heads, **{**options, "head_dim": width})
        factory = {name: options.get(name) for name in ("device", "dtype")}
        self.output = nn.Linear(heads * self.head_dim, dim, options.get("bias", True), **factory)

    def output_form(self) -> Form:
        """The OV circuit of each head; nothing is written to the time dimensions."""
        events = super().output_form()
        return Form(pad(events.query, (0, self.dim - events.dim)), events.key)


class _Additive(Attention):
    """Attention over x whose queries and keys are extended by Φ(t): fused attention sums both scores."""

    def __init__(self, dim: int, heads: int, time: TimeCode, **options: Any) -> None:
        super().__init__(dim, heads, **options)
        self.events, self.dim = dim, dim + time.dim
        start = math.log(math.expm1(1.0)) if self.kernel in POSITIVE else 1.0
        factory = {name: options.get(name) for name in ("device", "dtype")}
        self.raw = nn.Parameter(torch.full((heads, time.dim // 2), start, **factory))

    def weights(self) -> Float[Tensor, "heads f"]:
        """a, the weight of each frequency of ψ per head; ≥ 0 if the kernel must stay positive."""
        return softplus(self.raw) if self.kernel in POSITIVE else self.raw

    def queries_and_keys(self, x: Float[Tensor, "batch n dim"]) -> tuple[Tensor, Tensor]:
        """Queries (batch, heads, n, r + T) and keys (batch, kv_heads, n, r + T), before RoPE."""
        query, key = super().queries_and_keys(x[..., : self.events])
        code = x[..., self.events :].unsqueeze(1)
        longer = code * self._gains().unsqueeze(1).to(code.dtype)
        return torch.cat((query, longer), -1), torch.cat((key, code.expand(-1, self.kv_heads, -1, -1)), -1)

    def form(self) -> Form:
        """The forms of events and of times, as diagonal blocks."""
        events, gains, width = super().form(), self._gains(), self.dim - self.events
        same = torch.eye(width, dtype=gains.dtype, device=gains.device).expand(self.kv_heads, -1, -1)
        times = self._grouped(torch.diag_embed(gains), same).to(events.dtype)
        return _padded(events, 0, width) + _padded(times, self.events, 0)

    def output_form(self) -> Form:
        """The OV circuit of each head; it neither reads nor writes the time dimensions."""
        return _padded(super().output_form(), 0, self.dim - self.events)

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Biases of queries and keys; 0 in the time dimensions."""
        query, key = super().biases()
        width = self.dim - self.events
        return query if query is None else pad(query, (0, width)), key if key is None else pad(key, (0, width))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *self.queries_and_keys(x), self._heads(self.value(x[..., : self.events]), self.kv_heads)

    def _gains(self) -> Float[Tensor, "heads t"]:
        """The factor on Φ(t) in the query: a, divided by the score scale, which does not apply to ψ."""
        return (self.weights() / self.scale).repeat_interleave(2, -1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, visible: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        wide = as_wide(value, query.shape[-1])
        out, seen = super()._attend(query, key, wide, real, visible, is_causal)
        return out[..., : self.head_dim], seen

    def _centred(self, query: Tensor, key: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        pairs = zip(super()._centred(query, key, real), (query, key), strict=True)
        query, key = (torch.cat((new[..., : self.head_dim], old[..., self.head_dim :]), -1) for new, old in pairs)
        return query, key

    def _key_norm(self, key: Tensor) -> tuple[Tensor, ...]:
        return super()._key_norm(key[..., : self.head_dim])


def _padded(form: Form, before: int, after: int) -> Form:
    """A form of some dimensions of a wider space."""
    return Form(pad(form.query, (before, after)), pad(form.key, (before, after)))
