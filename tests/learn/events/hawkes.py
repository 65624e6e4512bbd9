"""Hawkes processes, simulated by thinning, or by `tick`: types that excite others at known lags."""

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


def simulate_by_tick(groups, until, base, kernel, cause, effect, seed=0):
    """The same by an independent library, where events of type `cause` add kernel(lags) to the rate of `effect`."""
    from tick.base import TimeFunction
    from tick.hawkes import HawkesKernel0, HawkesKernelTimeFunc, SimuHawkes

    lags = np.linspace(0, 20, 4001)
    kernels = np.array([[HawkesKernel0() for _ in base] for _ in base], dtype=object)
    kernels[effect, cause] = HawkesKernelTimeFunc(TimeFunction((lags, np.ascontiguousarray(kernel(lags)))))
    rows = []
    for group in range(groups):
        process = SimuHawkes(kernels, baseline=base, end_time=until, seed=seed + group, verbose=False)
        process.simulate()
        found = [(when, kind) for kind, times in enumerate(process.timestamps) for when in times]
        rows += [(kind, when, group) for when, kind in sorted(found)]
    return tuple(np.array(column) for column in zip(*rows, strict=True))
