"""The training of all estimators: Ctrl-C keeps the best weights so far."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.learn.training import Log, Recipe, train
from keyquery.learn.training.loop import Draw, Loss


def fit_network(
    network: nn.Module,
    draw: Draw,
    loss: Loss,
    recipe: Recipe,
    *,
    validate: Callable[[Any], float] | None = None,
    until: Callable[[int], bool] = lambda step: False,
    advice: str = "a smaller lr may help",
    verbose: bool = False,
    **options: Any,
) -> Log:
    """`train`, except that the first Ctrl-C ends it with a warning and keeps the best weights."""
    step_reached, last = 0, torch.tensor(0.0)

    def noted(model: nn.Module, batch: Any) -> Tensor:
        nonlocal last
        value = loss(model, batch)
        last = value.detach()
        return value

    def checked(model: Any) -> float:
        assert validate is not None
        result = validate(model)
        report(verbose, f"validation {step_reached // recipe.check_every + 1}: {result:.4f}")
        return result

    with first_interrupt_stops() as stopped:

        def ends(step: int) -> bool:
            nonlocal step_reached
            step_reached = step
            if verbose and validate is None and step and step % recipe.check_every == 0:
                report(verbose, f"step {step} of {recipe.steps}: loss {float(last):.4f}")
            return stopped() or until(step)

        check = None if validate is None else checked
        try:
            log = train(network, draw, noted, recipe, validate=check, until=ends, **options)
        except FloatingPointError as error:  # the loop suggests options that an estimator may not have
            raise FloatingPointError(f"{str(error).split(':')[0]}: {advice}") from None
        if stopped():
            log.interrupted = True
            kept = f"the best weights so far, of step {log.best_step}," if log.best_step else "the last weights"
            message = f"training was interrupted after step {step_reached} of {recipe.steps}: {kept} are kept"
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


def report(verbose: bool, text: str) -> None:
    """Print a line to stderr if `verbose`, where no progress bar is shown."""
    if verbose and not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
