"""Windows of event streams, in which every event is predicted once, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from keyquery.learn.inputs.event_streams import Stream


class Clock(NamedTuple):
    """Units of `scale` from `start`, or from the first event of each group: small numbers keep more digits of gaps."""

    scale: float
    start: float | None = None

    def begin(self, stream: Stream) -> Float64[np.ndarray, " groups"]:
        """The origin of time of each group."""
        return stream.times[stream.offsets[:-1]] if self.start is None else np.full(len(stream.groups), self.start)


class Batch(NamedTuple):
    """Input events and for each the next event; times in units of the median gap."""

    types: Int[Tensor, "batch n"]
    times: Float64[Tensor, "batch n"]
    real: Bool[Tensor, "batch n"]
    next_types: Int[Tensor, "batch n"]
    next_times: Float64[Tensor, "batch n"]
    counted: Bool[Tensor, "batch n"]  # the next event is predicted here, and in no other window
    inputs: Float[Tensor, "batch n k"] | None = None  # encoded covariates
    weights: Float64[Tensor, "batch n"] | None = None  # of the prediction of the next event

    @property
    def gaps(self) -> Float64[Tensor, "batch n"]:
        """The time from each event to the following one."""
        return self.next_times - self.times

    @property
    def predicted(self) -> Bool[Tensor, "batch n"]:
        """After which events the next one is predicted and of a known type."""
        return self.counted & (self.next_types >= 0)


class Windows(NamedTuple):
    """Slices of one long stream: window w sees `lengths[w]` events from `starts[w]`, and counts from `skips[w]` on."""

    types: Int[Tensor, " events"]
    times: Float64[Tensor, " events"]
    starts: Int[Tensor, " windows"]
    lengths: Int[Tensor, " windows"]
    skips: Int[Tensor, " windows"]
    inputs: Float[Tensor, "events k"] | None = None
    weights: Float64[Tensor, " events"] | None = None

    def take(self, index: Any) -> Batch:
        """A batch of some windows, padded to the longest of them."""
        chosen = torch.as_tensor(index, device=self.starts.device)
        lengths = self.lengths[chosen].unsqueeze(1)
        rank = torch.arange(int(lengths.max()), device=self.starts.device)
        real = rank < lengths
        rows = (self.starts[chosen].unsqueeze(1) + rank).where(real, 0)
        following, times = (rows + 1).clamp(max=len(self.types) - 1), self.times[rows]
        return Batch(
            self.types[rows].where(real, 0),
            times.where(real, times[:, :1]),  # padding has the time of the window's first event
            real,
            self.types[following].where(real, 0),
            self.times[following].where(real, times[:, :1]),
            real & (rank >= self.skips[chosen].unsqueeze(1)),
            None if self.inputs is None else self.inputs[rows].where(real.unsqueeze(-1), 0.0),
            None if self.weights is None else self.weights[following],
        )

    def batches(self, size: int) -> Iterator[Batch]:
        """Batches of all windows, longest first, to minimise padding."""
        for part in torch.argsort(self.lengths, descending=True, stable=True).split(size):
            yield self.take(part)

    def of(self, chosen: Bool[Tensor, " windows"]) -> Windows:
        """A subset of the windows."""
        return self._replace(starts=self.starts[chosen], lengths=self.lengths[chosen], skips=self.skips[chosen])


def cut(stream: Stream, clock: Clock, window: int, device: str) -> tuple[Windows, Int[np.ndarray, " windows"]]:
    """Windows of at most `window` events, and the number of the group of each.

    Windows of a longer group overlap by half, so that only its first events have less than half a window of history.
    """
    rows = []
    for group, (first, end) in enumerate(zip(stream.offsets[:-1], stream.offsets[1:] - 1, strict=True)):
        done = first  # events from `first` up to `end` have a successor
        while done < end:
            stop = min(end, max(done + window // 2, first + window))
            start = max(first, stop - window)
            rows.append((start, stop - start, done - start, group))
            done = stop
    starts, lengths, skips, groups = np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()
    return _windows(stream, clock, device, starts, lengths, skips), groups


def ends(stream: Stream, clock: Clock, window: int, device: str) -> Windows:
    """The last `window` events of each group, of which only the last is counted."""
    lengths = np.minimum(stream.lengths, window)
    return _windows(stream, clock, device, stream.offsets[1:] - lengths, lengths, lengths - 1)


def _windows(stream: Stream, clock: Clock, device: str, *bounds: np.ndarray) -> Windows:
    times = (stream.times - np.repeat(clock.begin(stream), stream.lengths)) / clock.scale
    parts = (stream.types, times, *bounds, stream.inputs, stream.weights)
    return Windows(*(None if part is None else torch.from_numpy(part).to(device) for part in parts))  # type: ignore[arg-type]
