"""The training of all estimators: Ctrl-C keeps the best weights so far."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from keyquery.learn.training import Log, Recipe, train
from keyquery.learn.training.loop import Draw, Loss


def epochs_of(take: Callable[[Any], Any], count: int, size: int, seed: int, least: int = 1) -> tuple[Draw, int]:
    """A function that draws batches, shuffled in every pass, and their number per epoch, `least` or more."""
    every = -(-count // size)

    def draw(step: int, generator: torch.Generator) -> Any:
        number, batch = divmod(step, every)
        order = np.random.default_rng((seed, number)).permutation(count)
        return take(order[batch * size :][:size])

    return draw, every * -(-least // every)


def fit_network(
    network: nn.Module,
    draw: Draw,
    loss: Loss,
    recipe: Recipe,
    *,
    until: Callable[[int], bool] = lambda step: False,
    advice: str = "a smaller lr may help",
    **options: Any,
) -> Log:
    """`train`, except that the first Ctrl-C ends it with a warning and keeps the best weights."""
    reached = 0
    with first_interrupt_stops() as stopped:

        def ends(step: int) -> bool:
            nonlocal reached
            reached = step
            return stopped() or until(step)

        try:
            log = train(network, draw, loss, recipe, until=ends, **options)
        except FloatingPointError as error:  # the loop suggests options that an estimator may not have
            raise FloatingPointError(f"{str(error).split(':')[0]}: {advice}") from None
        if stopped():
            log.interrupted = True
            kept = f"the best weights so far, of step {log.best_step}," if log.best_step else "the last weights"
            message = f"training was interrupted after step {reached} of {recipe.steps}: {kept} are kept"
            warnings.warn(message, stacklevel=4)
    return log


@contextmanager
def first_interrupt_stops() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed; the second raises KeyboardInterrupt as usual."""
    pressed, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    if threading.current_thread() is not threading.main_thread():  # only that one receives signals
        yield pressed.is_set
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
