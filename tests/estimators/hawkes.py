"""Hawkes processes, simulated by thinning: types that excite others at known lags."""

import numpy as np


def simulate(groups, until, base, excite, bound, seed=0):
    """Events of `groups` histories up to time `until` (events, times, groups).

    `base` (types,) are the rates without a past; `excite(lags, types)` (n, types) are what past events add to them;
    `bound` is more than all rates ever are.
    """
    rng, rows = np.random.default_rng(seed), []
    for group in range(groups):
        now, times, types = 0.0, [], []
        while (now := now + rng.exponential(1 / bound)) < until:
            total = np.cumsum(rates(now, np.array(times), np.array(types, dtype=int), base, excite))
            assert total[-1] < bound
            drawn = rng.random() * bound
            if drawn < total[-1]:
                times.append(now)
                types.append(int(np.searchsorted(total, drawn)))
        rows += [(kind, when, group) for kind, when in zip(types, times, strict=True)]
    return tuple(np.array(column) for column in zip(*rows, strict=True))


def rates(now, times, types, base, excite):
    """The rates (types,) at a time, given the events before."""
    return base + excite(now - times, types).sum(0) if len(times) else base
