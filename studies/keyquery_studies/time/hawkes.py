"""A simulated Hawkes process, in which times matter and the best possible prediction is known."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from keyquery_studies.time.event_files import Timed

TYPES = 4
BASE = np.full(TYPES, 0.05)  # events per unit of time
DECAY = 1.0  # of the excitation, per unit of time
# Type j raises the rate of itself and of the next type (row: what is raised): 0.8 further events per event.
EXCITATION = 0.6 * np.eye(TYPES) + 0.2 * np.roll(np.eye(TYPES), 1, axis=0)
GRID = np.concatenate((np.linspace(0, 2, 201), np.geomspace(2, 400, 300)[1:]))  # of the integral over the next gap


def simulate(groups: int = 1500, length: int = 60, seed: int = 0) -> Timed:
    """Sequences of `length` events each, from Ogata's thinning."""
    random = np.random.default_rng(seed)
    types, times = np.empty((groups, length), dtype=np.int64), np.empty((groups, length))
    for group in range(groups):
        now, raised = 0.0, np.zeros(TYPES)
        for place in range(length):
            while True:
                bound = BASE.sum() + raised.sum()  # the rate only falls until the next event
                gap = random.exponential(1 / bound)
                now, raised = now + gap, raised * np.exp(-DECAY * gap)
                rates = BASE + raised
                if random.uniform() * bound < rates.sum():
                    break
            kind = random.choice(TYPES, p=rates / rates.sum())
            raised = raised + DECAY * EXCITATION[:, kind]
            types[group, place], times[group, place] = kind, now
    return Timed(types.ravel(), times.ravel(), np.repeat(np.arange(groups), length))


def exact(events: Timed) -> dict[str, float]:
    """NLL of the next type and of the next gap (per median gap) under the true process, of all but first events.

    The process starts with the first event of a group. The type is predicted without its time:
    P(k) = ∫ λ_k(t) exp(−∫₀ᵗ λ) dt.
    """
    raised, kinds, gaps = _states(events)
    integral = BASE.sum() * GRID + raised.sum(1, keepdims=True) * (1 - np.exp(-DECAY * GRID)) / DECAY
    alive = np.exp(-integral)
    fading = alive * np.exp(-DECAY * GRID)
    mass = BASE * np.trapezoid(alive, GRID)[:, None] + raised * np.trapezoid(fading, GRID)[:, None]
    chances = mass / mass.sum(1, keepdims=True)
    rate = BASE.sum() + raised.sum(1) * np.exp(-DECAY * gaps)
    waited = BASE.sum() * gaps + raised.sum(1) * (1 - np.exp(-DECAY * gaps)) / DECAY
    density = np.log(rate) - waited
    return {
        "accuracy": float((chances.argmax(1) == kinds).mean()),
        "nll_type": float(-np.log(chances[np.arange(len(kinds)), kinds]).mean()),
        "nll_gap": float(-density.mean()),
    }


def _states(
    events: Timed,
) -> tuple[Float64[np.ndarray, "pairs types"], np.ndarray, Float64[np.ndarray, " pairs"]]:
    """The raised rates just after each event that has a successor, and the type and gap of that successor."""
    states, raised = [], np.zeros(TYPES)
    gaps = np.diff(events.times)
    inside = events.groups[1:] == events.groups[:-1]
    for place, kind in enumerate(events.types[:-1]):
        raised = raised + DECAY * EXCITATION[:, kind]
        states.append(raised)
        raised = raised * np.exp(-DECAY * gaps[place]) if inside[place] else np.zeros(TYPES)
    return np.array(states)[inside], events.types[1:][inside], gaps[inside]
