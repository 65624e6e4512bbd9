"""The losses of a model under one change of heads after another, as many in one batch as the device takes.

Blocks are the members of a `ModuleList` through which the residual stream passes one after another. While one of them
is changed, those before it return what the last of them returned in the original run, without computing anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.instruments.ablation.changes import HeadCall, Trial
from keyquery.instruments.ablation.losses import (
    OUTPUT,
    Loss,
    Objective,
    checked,
    losses_of,
    output_of,
    real_outputs,
    repeated,
)
from keyquery.intervene.dial.means import SiteMeans
from keyquery.intervene.rewrites import check_unchanged
from keyquery.intervene.sites import Site
from keyquery.listening import Batch
from keyquery.listening.call import Call
from keyquery.listening.exclusive import temporarily
from keyquery.listening.hooks import evaluating, is_compiled, on_output, replace_method
from keyquery.listening.listen import add_listener
from keyquery.support.progress import Progress, Runs, silent

TOKENS = {"cuda": 32768, "cpu": 2048}  # of a run that leaves a device little idle time
# Kinds of error of a model that does not run on repeated inputs, or not in part: any code may be in it.
REFUSALS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class Measurement:
    """Runs of a model, many trials in one batch if the first such batch of a layer agrees with a trial alone."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        loss: Loss,
        sites: Mapping[int, Site],
        means: Mapping[int, SiteMeans],
    ) -> None:
        check_unchanged(model)
        self._sites, self._means = sites, means
        self._by_module = {site.module: site for site in sites.values()}
        self._trials: Sequence[Trial] = ()  # that are on
        self._run = model, batches, Moved() if loss is OUTPUT else loss
        self._most = _fitting(*self._run)
        self.before = self._losses()

    def _losses(self) -> Float[Tensor, " sequences"]:
        return losses_of(*self._run)

    def losses(self, trials: Sequence[Trial], progress: Progress | None = None) -> list[Float[Tensor, " sequences"]]:
        """Losses per sequence of trials; they run layer by layer."""
        model, batches, _ = self._run
        by_sites: dict[tuple[int, ...], list[int]] = {}
        for number, trial in enumerate(trials):
            by_sites.setdefault(tuple(trial.heads), []).append(number)
        order = [number for numbers in by_sites.values() for number in numbers]
        tokens = sum(batch["input_ids"].numel() for batch in batches if "input_ids" in batch)
        watched = iter((progress or silent)(Runs(order, tokens), "measuring", len(order)))
        measured: dict[int, Tensor] = {}
        with temporarily(model, partial(add_listener, model, self._changed)):
            for sites, numbers in by_sites.items():
                self._trials = ()
                with self._below(sites) as tape:
                    runs = self._of_layer((trials[next(watched)] for _ in numbers), tape)
                    measured |= dict(zip(numbers, runs, strict=True))
        return [measured[number] for number in range(len(trials))]

    def _losses_together(self, copies: int) -> Float[Tensor, "copies sequences"]:
        """Losses of copies of the inputs; the model runs once per batch, on all of them."""
        model, batches, loss = self._run
        with evaluating(model):
            return torch.cat([checked(loss(model, batch, copies)).reshape(copies, -1) for batch in batches], -1)  # type: ignore[call-arg]

    def _below(self, sites: tuple[int, ...]) -> AbstractContextManager[Tape | None]:
        """Context in which the layers below the one site that changes run no more."""
        if len(sites) > 1:
            return nullcontext()
        return from_block(self._run[0], self._sites[sites[0]].name.removesuffix(" (rope)"), self._losses)

    def _changed(self, call: Call) -> Mapping[str, Tensor] | None:
        """The output of a call with the heads of all trials changed, each in its part of the batch."""
        site = self._by_module.get(call.module)
        if site is None or call.is_cross or not any(site.index in trial.heads for trial in self._trials):
            return None
        output, rows = call.attend({}).clone(), len(call.query) // len(self._trials)
        if rows * len(self._trials) != len(call.query):
            raise ValueError(f"{len(call.query)} sequences cannot be divided among {len(self._trials)} trials")
        for number, trial in enumerate(self._trials):
            heads = trial.heads.get(site.index, [])
            if heads:
                part = slice(number * rows, (number + 1) * rows)
                span = range(min(heads), max(heads) + 1)
                rows_of_trial = call if len(self._trials) == 1 else call.part(part)
                out = trial.change.output(HeadCall(rows_of_trial, site, span, self._means.get(site.index)))
                output[part, heads] = out[:, [head - span.start for head in heads]].to(output)
        return {"output": output}

    def _of_layer(self, trials: Iterable[Trial], tape: Tape | None) -> Iterator[Float[Tensor, " sequences"]]:
        rest, proven = iter(trials), False
        while some := list(islice(rest, self._most)):
            together = self._together(some, tape, proven) if len(some) > 1 else None
            if len(some) > 1 and together is None:
                self._most = 1
            proven = proven or together is not None
            yield from together or (self._alone(trial, tape) for trial in some)

    def _alone(self, trial: Trial, tape: Tape | None) -> Float[Tensor, " sequences"]:
        if tape is not None:
            tape.rewind()
        self._trials = [trial]
        return self._losses()

    def _together(self, trials: Sequence[Trial], tape: Tape | None, proven: bool) -> list[Tensor] | None:
        """Losses of several trials as one batch, halved as long as memory does not suffice; None if they differ."""
        losses: list[Tensor] = []
        while len(losses) < len(trials):
            some = trials[len(losses) : len(losses) + self._most]
            if tape is not None:
                tape.rewind(len(some))
            self._trials = some
            try:
                losses += self._losses_together(len(some))
            except torch.OutOfMemoryError:
                if len(some) == 1:
                    raise
                self._most = len(some) // 2
            except REFUSALS:
                return None
        return losses if proven or _near(losses[-1], self._alone(trials[-1], tape), self._run[0]) else None


class Moved:
    """How far the output moves from that of the model as it is: a share of its squared norm, per sequence."""

    def __init__(self) -> None:
        self._before: dict[int, Tensor] = {}  # by batch

    def __call__(self, model: nn.Module, batch: Batch, copies: int = 1) -> Float[Tensor, " sequences"]:
        """The change since the first call with a batch."""
        rows = len(next(x for x in batch.values() if isinstance(x, Tensor)))
        inputs = repeated(batch, copies, rows)
        output = output_of(model, inputs).double()
        real = real_outputs(output, inputs)
        output = output * real.reshape(*real.shape, *[1] * (output.ndim - real.ndim))
        before = repeated(self._before.setdefault(id(batch), output), copies)
        return (output - before).flatten(1).square().sum(1) / before.flatten(1).square().sum(1)


def _fitting(model: nn.Module, batches: Sequence[Batch], loss: Loss) -> int:
    """How many copies of the inputs a run takes, from their tokens; memory may allow fewer."""
    tokens = max((batch["input_ids"].numel() for batch in batches if "input_ids" in batch), default=0)
    if is_compiled(model) or not tokens or not isinstance(loss, (Objective, Moved)):  # one shape per graph
        return 1
    return max(TOKENS.get(next(model.parameters()).device.type, 0) // tokens, 1)


def _near(losses: Tensor, expected: Tensor, model: nn.Module) -> bool:
    """Whether losses agree up to rounding in the dtype of the model."""
    limit = torch.finfo(next(model.parameters()).dtype).eps ** 0.75 * max(float(expected.abs().max()), 1.0)
    return losses.shape == expected.shape and bool(((losses - expected).abs() <= limit).all())


@contextmanager
def from_block(model: nn.Module, module: str, run: Callable[[], Tensor]) -> Iterator[Tape | None]:
    """Without the blocks before a module's, whose outputs are a tape; None if `run` differs by a bit without them."""
    blocks = _before(model, module)
    with ExitStack() as changes:
        if not blocks:
            yield None
            return
        recorded: list[Any] = []
        with ExitStack() as recording:
            on_output(blocks[-1], lambda block, args, kwargs, out: recorded.append(out), recording)
            whole = run()
        if recorded:
            tape = Tape(recorded)
            for block in blocks:
                replace_method(block, "forward", tape.play if block is blocks[-1] else tape.peek, changes)
        if not recorded or not _same(run, whole):
            changes.close()
            yield None
            return
        yield tape


class Tape:
    """The outputs of a block, in the order of its calls, again and again, also repeated along the batch."""

    def __init__(self, outputs: list[Any]) -> None:
        self._outputs = outputs
        self.rewind()

    def rewind(self, copies: int = 1) -> None:
        """Begin with the first call, and repeat its rows."""
        self._at, self._copies, self._now = 0, copies, None

    def peek(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the current call."""
        if self._now is None:
            self._now = repeated(self._outputs[self._at], self._copies)
        return self._now

    def play(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the current call, which ends with it."""
        output = self.peek()
        self._at, self._now = (self._at + 1) % len(self._outputs), None
        return output


def _before(model: nn.Module, module: str) -> list[nn.Module]:
    """The blocks before the one that a module belongs to."""
    parts = module.split(".")
    for depth in range(len(parts)):
        try:
            around = model.get_submodule(".".join(parts[:depth]))
        except AttributeError:
            return []
        if isinstance(around, nn.ModuleList) and parts[depth].isdecimal():
            return list(around)[: int(parts[depth])]
    return []


def _same(run: Callable[[], Tensor], whole: Tensor) -> bool:
    try:
        return torch.equal(run(), whole)
    except REFUSALS:
        return False
