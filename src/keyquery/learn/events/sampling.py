"""Events drawn from a fitted model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Shaped

from keyquery.learn.inputs.columns import in_clock
from keyquery.learn.inputs.event_streams import longer
from keyquery.support.progress import Progress, silent


class Events(NamedTuple):
    """Sampled events as three columns of equal length."""

    events: Shaped[np.ndarray, " n"]
    times: Shaped[np.ndarray, " n"]
    groups: Shaped[np.ndarray, " n"]


def sampled(model: Any, stream: Any, n: int, seed: int, progress: Progress = silent) -> Events:
    """The next n events of each group of a stream: the time first, then the type at that time.

    Where the model knows ends, a group has fewer if its end is drawn. Covariates of drawn events are unknown.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = model._codes(stream)
    drawn_codes, drawn_times, alive = list[Any](), list[Any](), [np.ones(len(stream.groups), dtype=bool)]
    inputs = None if stream.inputs is None else model.described_.unknown(stream.inputs[stream.offsets[1:] - 1])
    for _ in progress(range(n), "sampling", n):
        logits, mixture = model._last(stream, stream.last, codes)
        when = stream.last + mixture.draw(generator).double().cpu().numpy() * model.scale_
        if model._targeted:
            logits, _ = model._last(stream, when, codes)
        kind = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).squeeze(1).numpy()
        alive.append(alive[-1] & (kind < len(model.classes_)))
        kind = np.minimum(kind, len(model.classes_) - 1)  # what follows an end is left out
        stream, codes = longer(stream, codes, kind, when, inputs)
        drawn_codes.append(kind)
        drawn_times.append(when)
    kept = np.stack(alive[1:], 1).ravel()
    times = in_clock(np.stack(drawn_times, 1).ravel()[kept], model.clock_)
    kinds = np.stack(drawn_codes, 1).ravel()[kept]
    return Events(model.classes_[kinds], times, np.repeat(stream.groups, n)[kept])
