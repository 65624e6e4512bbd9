"""Draws events.svg: a model of a simulated plant, asked which events matter when."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import keyquery as kq
from keyquery import pages

HOUR, TYPES = 3600.0, np.array(["alarm", "failure", "reset", "visit"])


def plant(hours: float, rng: np.random.Generator) -> list[tuple[float, int]]:
    """Alarms and visits at any time; four hours after most alarms a failure, and soon after each failure a reset."""
    found = [(at, kind) for kind in (0, 3) for at in rng.uniform(0, hours, rng.poisson(hours / 12))]
    failures = [at + rng.normal(4, 0.4) for at, kind in found if kind == 0 and rng.random() < 0.7]
    found += [(at, 1) for at in failures] + [(at + rng.exponential(0.3), 2) for at in failures]
    return sorted((at, kind) for at, kind in found if 0 < at < hours)


def main() -> None:
    """Simulate, fit, ask, and write the picture beside this file."""
    rng = np.random.default_rng(0)
    rows = [(at, kind, group) for group in range(200) for at, kind in plant(200.0, rng)]
    times, kinds, groups = (np.array(column) for column in zip(*rows, strict=True))
    dates = np.datetime64("2024-01-01", "ms") + (times * HOUR * 1000).astype("m8[ms]")
    model = kq.EventModel(
        information="target_time", width=32, window=30, epochs=40, lr=5e-3, random_state=0, device="cpu"
    )
    events = TYPES[kinds.astype(int)], dates, groups
    reading = model.fit(*events).interactions(*events, lags=np.geomspace(0.1, 24, 24) * HOUR)
    path = Path(__file__).with_name("events.svg")
    path.write_bytes(pages.picture_bytes(path, reading))


if __name__ == "__main__":
    main()
