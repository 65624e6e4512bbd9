"""The losses of a model under one ablation after another, as many in one batch as the device takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints.positions.given import GIVEN
from keyquery.checkpoints.positions.relative import TABLES, VECTORS
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.losses import Loss
from keyquery.instruments.ablation.replay import Tape
from keyquery.instruments.ablation.variants import fitting, losses_of, losses_together
from keyquery.intervene.dial.dial import Dial
from keyquery.intervene.sites import Site
from keyquery.listening import Batch

# Kinds of error of a model that does not run on repeated inputs: any code may be in it.
REFUSALS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class Trial(NamedTuple):
    """What is ablated in a run: a part of some heads, or whole heads ("zero", "mean")."""

    layer: int | None
    head: int | None
    heads: Any  # that are ablated together, as in `kq.dial`
    part: str


class Trials:
    """Runs of a dialled model, one or many trials at a time; what they return differs by rounding.

    Many run as one batch of repeated inputs, each with its gains, if the first such batch of a layer agrees with a run
    of its last trial alone. Memory that does not suffice halves the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        loss: Loss,
        dialled: Dial,
        whole: Callable[..., AbstractContextManager[Any]],
    ) -> None:
        self._run = model, batches, loss
        self._dial, self._whole = dialled, whole
        self._most = fitting(model, batches)

    def losses(
        self, trials: Iterable[Trial], sites: Iterable[Site], tape: Tape | None
    ) -> Iterator[tuple[Trial, Float[Tensor, " sequences"]]]:
        """Losses per sequence of trials in the same layer; `tape` replaces the blocks below it."""
        trials, proven = iter(trials), False
        single = not all(map(_divisible, sites))
        while own := list(islice(trials, 1 if single else self._most)):
            parts = [trial for trial in own if trial.part in PARTS]
            together = None if single or len(parts) < 2 else self._together(parts, tape, proven)
            single = single or (together is None and len(parts) > 1)
            proven = proven or together is not None
            known = iter(together or ())
            for trial in own:
                yield trial, next(known) if together and trial.part in PARTS else self._alone(trial, tape)

    def _alone(self, trial: Trial, tape: Tape | None) -> Float[Tensor, " sequences"]:
        if tape is not None:
            tape.rewind()
        part = trial.part in PARTS
        self._dial.turn(trial.heads, **({trial.part: 0.0} if part else {}))
        with nullcontext() if part else self._whole(trial.part, trial.heads):
            return losses_of(*self._run)

    def _together(self, trials: Sequence[Trial], tape: Tape | None, proven: bool) -> list[Tensor] | None:
        """Losses of several trials as one batch, halved as long as memory does not suffice; None if they differ."""
        losses: list[Tensor] = []
        while len(losses) < len(trials):
            own = trials[len(losses) : len(losses) + self._most]
            if tape is not None:
                tape.rewind(len(own))
            self._dial.turn_rows([(trial.heads, {trial.part: 0.0}) for trial in own])
            try:
                losses += losses_together(*self._run, len(own))
            except torch.OutOfMemoryError:
                if len(own) == 1:
                    raise
                self._most = len(own) // 2
            except REFUSALS:
                return None
        return losses if proven or _near(losses[-1], self._alone(trials[-1], tape), self._run[0]) else None


def _near(losses: Tensor, expected: Tensor, model: nn.Module) -> bool:
    """Whether losses agree up to rounding in the dtype of the model."""
    dtype = next((weight.dtype for weight in model.parameters()), torch.float32)
    limit = torch.finfo(dtype).eps ** 0.75 * max(float(expected.abs().max()), 1.0)
    return losses.shape == expected.shape and bool(((losses - expected).abs() <= limit).all())


def _divisible(site: Site) -> bool:
    """Whether rows can have gains of their own: a position bias has one gain for all."""
    return site.position not in ("alibi", "scaled alibi", "t5", *VECTORS, *TABLES, *GIVEN)
