"""Events drawn from a fitted model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Shaped

from keyquery.estimators.inputs.columns import in_clock
from keyquery.estimators.inputs.event_streams import longer


class Events(NamedTuple):
    """Sampled events as three columns of equal length."""

    events: Shaped[np.ndarray, " n"]
    times: Shaped[np.ndarray, " n"]
    groups: Shaped[np.ndarray, " n"]


def sampled(model: Any, stream: Any, n: int, seed: int) -> Events:
    """The next n events of each group of a stream: the time first, then the type at that time."""
    generator = torch.Generator().manual_seed(seed)
    codes = model._codes(stream)
    drawn_codes, drawn_times = [], []
    for _ in range(n):
        logits, mixture = model._last(stream, stream.last, codes)
        when = stream.last + mixture.draw(generator).double().cpu().numpy() * model.scale_
        if model._targeted:
            logits, _ = model._last(stream, when, codes)
        kind = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).squeeze(1).numpy()
        stream, codes = longer(stream, codes, kind, when)
        drawn_codes.append(kind)
        drawn_times.append(when)
    times = in_clock(np.stack(drawn_times, 1).ravel(), model.clock_)
    return Events(model.classes_[np.stack(drawn_codes, 1).ravel()], times, np.repeat(stream.groups, n))
