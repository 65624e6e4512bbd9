"""`Monitor`: attention logits, entropy, sinks and the QK form of every head, recorded while a model trains."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.distributed import get_rank, get_world_size, is_available, is_initialized
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from keyquery.checkpoints import read
from keyquery.checkpoints.sources import bare
from keyquery.instruments.monitor.alarms import Rules
from keyquery.instruments.monitor.callbacks import lightning_callback, trainer_callback
from keyquery.instruments.monitor.clip import clip_record
from keyquery.instruments.monitor.layers import Layers
from keyquery.instruments.monitor.records import Recorder, reading_of
from keyquery.instruments.monitor.step import Step, everywhere
from keyquery.listening.functions import looks_like_attention
from keyquery.listening.hooks import around_calls, device_of, is_compiled, untouched
from keyquery.support.checks import check_count, check_number
from keyquery.support.printable import first_line


class Monitor:
    """Record every head's attention logits while a model trains, and warn before they explode.

    Any model will do that `kq.listen` sees. Every `every` optimiser steps, queries and keys are read where they enter
    attention in the forward of that step: kernels stay in use, and training is bit-identical with and without the
    monitor. Queries at padding do not count. In compiled models the batch of that step is run once more, uncompiled,
    without gradients or dropout.

    `with monitor:` counts the steps of the model's optimiser; `monitor.step()` after each `optimiser.step()` does it by
    hand; `monitor.callback()` and `monitor.lightning()` are callbacks of the transformers Trainer and of Lightning, to
    whose loggers they give the extremes over heads. A monitor that is deleted leaves the model as it was.

    Parameters
    ----------
    model
        The model that is trained, as it is called: compiled, wrapped by DDP, or after `fully_shard`.
    every
        Optimiser steps between records. Default: 50.
    structure
        Records between measurements of effective ranks and of the symmetric, skew, popularity and position shares.
        Shares need 32 sequences in the forwards of the step. Default: 10.
    rules
        Which alarms, and their thresholds (`Rules`). Default: those of few false alarms in the study `stability`.
    on_alarm
        Called with each alarm, a dict. Default: one line on standard error.
    folder
        Where records are written as they are made (`monitor.jsonl`), for `keyquery monitor` and for resuming.
        Default: none.
    strict
        Whether an exception in the monitor stops training; otherwise it becomes a warning. Default: False.
    name
        Name of the model. Default: that of its class.

    Examples
    --------
    >>> model = kq.Decoder(16, depth=1, heads=2)
    >>> optimiser = torch.optim.AdamW(model.parameters())
    >>> with kq.Monitor(model, every=2) as monitor:
    ...     for step in range(4):
    ...         model(torch.randn(2, 8, 16)).square().mean().backward()
    ...         optimiser.step()
    >>> monitor.reading().steps
    [0, 2]
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        *,
        structure: int = 10,
        rules: Rules | None = None,
        on_alarm: Callable[[dict[str, Any]], Any] | None = None,
        folder: str | Path | None = None,
        strict: bool = False,
        name: str | None = None,
    ) -> None:
        check_count("every", every)
        check_count("structure", structure)
        if rules is not None and not isinstance(rules, Rules):
            raise TypeError(f"rules must be a Rules, got {type(rules).__name__}")
        self.model, self._outer = bare(model), model
        self.every, self.structure, self.strict = every, structure, strict
        self.count = 0  # optimiser steps so far
        self.layers, self.unread = _layers_of(self.model)
        self.name = name or type(self.model).__name__
        self._on_alarm = on_alarm or _print
        self._shared = _shared(model)
        writes = not self._shared or get_rank() == 0
        self.recorder = Recorder(self.name, every, rules or Rules(), folder, writes)
        self._check_folder()
        self._step = Step()
        self._losses: list[Tensor] = []  # since the last record
        self._ran = False  # whether a forward was seen in the current step
        self._warned: set[str] = set()
        self._counts_steps = False  # whether an optimiser does
        self._weights = {id(weight) for weight in self.model.parameters()}  # of the optimiser whose steps are counted
        self._hooks = ExitStack()
        finalize(self, self._hooks.close).atexit = False
        self._attach()

    def add_loss(self, loss: Tensor | float) -> None:
        """Give the loss of a step; its mean between records is recorded, and the rule `loss` warns when it rises."""
        self._losses.append(torch.as_tensor(loss).detach().double().mean())  # the device is not waited for

    def step(self) -> None:
        """Signal the end of an optimiser step; before gradients are zeroed, if their norms are to be recorded."""
        if self._counts_steps:
            raise ValueError("inside `with monitor` steps are counted by the optimiser: omit monitor.step()")
        self.gradients()
        self._stepped()

    def clip(self, tau: float = 100.0) -> list[dict[str, Any]]:
        """QK-Clip: scale down query and key weights of the heads whose largest recorded logit exceeds `tau`.

        Call it after an optimiser step. It uses the latest record, once: on that batch, with the weights and inputs of
        the record, no clipped head's logits would exceed `tau`; the optimiser step itself, and clipped layers below,
        may have changed them. Heads that share keys (GQA) have their queries scaled alone; latent attention (MLA) as
        published. Biases of queries and keys are scaled with their weights, relative position biases (T5) are not.
        Returns the clipped heads: step, name, largest logit and factor of the scores, which are also recorded.
        """
        self._check_clip(tau)
        return self._safely(self._clip, float(tau)) or []

    def callback(self, tau: float | None = None) -> Any:
        """A callback for the transformers Trainer (extra `hf`); with tau, heads are clipped after each record.

        Extremes over heads go to `Trainer.log`, and the loss that it logs comes to the monitor.
        """
        self._check_clip(tau)
        return trainer_callback(self, tau)

    def lightning(self, tau: float | None = None) -> Any:
        """A callback for Lightning; the monitored model is the one that `training_step` calls.

        Extremes over heads go to `log_dict`, and the loss of every batch comes to the monitor.
        """
        self._check_clip(tau)
        return lightning_callback(self, tau)

    def gradients(self) -> None:
        """Record gradient norms, if the step is recorded; before the optimiser's step, if by hand."""
        if self.due and self.layers is not None:
            self._safely(self._step.read_gradients, self.layers)

    def reading(self) -> Any:
        """All records so far, as a Reading."""
        return reading_of(self.recorder.state(), {"every": self.every, "unread": self.unread})

    def summaries(self) -> list[dict[str, float]]:
        """Extremes over heads, for a logger, of every record since the last call."""
        return self.recorder.summaries()

    def resume(self, step: int) -> None:
        """Continue at an optimiser step: later records, of a run that was interrupted, are dropped."""
        check_count("step", step, least=0)
        self.count = step
        self.recorder.drop(step)

    def close(self) -> None:
        """Remove all hooks; the records stay."""
        self._hooks.close()
        self._counts_steps = False

    def __enter__(self) -> Monitor:
        self._attach()
        self._counts_steps = True
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def due(self) -> bool:
        """Whether the current step is recorded."""
        return self.count % self.every == 0

    def _attach(self) -> None:
        self._hooks.close()
        monitor = ref(self)  # the model must not keep a monitor that is deleted

        def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            watching = monitor()
            return call(*args, **kwargs) if watching is None else watching._forward(call, *args, **kwargs)

        around_calls(self._outer, around, self._hooks)

    # The forward of a recorded step

    def _forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward, and record it if its step is recorded."""
        if not self.due or not self._outer.training:
            return call(*args, **kwargs)
        self._ran = True
        if is_compiled(self._outer):
            out = call(*args, **kwargs)
            self._safely(self._replay, args, kwargs)
            return out
        changes = ExitStack()
        listening = self._safely(self._listen, changes)
        try:
            out = call(*args, **kwargs)
        except BaseException:
            self._step = Step()  # its forwards are not whole
            raise
        finally:
            self._safely(changes.close)
        if listening:
            self._safely(self._read)
        return out

    def _listen(self, changes: ExitStack) -> bool:
        if isinstance(self._outer, nn.DataParallel) and len(self._outer.device_ids) > 1:
            raise ValueError("DataParallel runs copies of the model, which are not seen: use DistributedDataParallel")
        if not self._step.seen:
            self._step = Step(structure=len(self.recorder.records) % self.structure == 0)
        self._step.attach(self.model, changes)
        return True

    def _replay(self, args: Any, kwargs: Any) -> None:
        """Run the batch of a compiled model once more, uncompiled."""
        device = device_of(self.model).type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        with (
            untouched(self.model),
            torch.autocast(device, dtype, enabled, cache_enabled=False),  # weights cast here have no gradients
            torch.compiler.set_stance("force_eager"),
            ExitStack() as changes,
        ):
            self._listen(changes)
            self.model(*args, **kwargs)
        self._read()

    def _read(self) -> None:
        if self._step.error is not None:
            error, self._step = self._step.error, Step()
            raise error
        if not self._step.seen:
            raise ValueError(f"no attention call of {self.name} went through torch: nothing is recorded")
        self._step.read(self.layers)

    # Steps

    def _before_step(self, optimiser: Optimizer, *arguments: Any) -> None:
        if self._counts(optimiser):
            self.gradients()

    def _after_step(self, optimiser: Optimizer, *arguments: Any) -> None:
        if self._counts(optimiser):
            self._stepped()

    def _counts(self, optimiser: Optimizer) -> bool:
        """Whether it is the model's first optimiser, or one that replaces it, not one of other weights."""
        weights = {id(weight) for group in optimiser.param_groups for weight in group["params"]}
        if counts := not weights.isdisjoint(self._weights):
            self._weights = weights
        return counts

    def _stepped(self) -> None:
        if self.due and not self._ran:
            self._warn(
                f"the monitor saw no forward of {self.name} in training mode before step {self.count}: if the model is"
                " compiled or wrapped, make the monitor of what is called, after that"
            )
        self._ran = False
        if self.due:
            for alarm in self._safely(self._record) or ():
                self._safely(self._on_alarm, alarm)
        self.count += 1

    def _record(self) -> list[dict[str, Any]]:
        """Close the record of a step; returns its alarms."""
        step, self._step = self._step, Step()
        complete = bool(step.seen)
        if not (everywhere(complete) if self._shared else complete):
            return []
        loss = torch.stack(self._losses).mean() if self._losses else None
        self._losses = []
        dtype = str(next(reversed(step.seen.values())).dtype).removeprefix("torch.")
        return self.recorder.add(self.count, step.heads(), step.columns(loss, self._shared), dtype)

    def _clip(self, tau: float) -> list[dict[str, Any]]:
        if self.layers is None or not self.recorder.records or "clips" in self.recorder.records[-1]:
            return []
        clips = clip_record(self.recorder.records[-1], self.recorder.heads, self.model, self.layers, tau)
        self.recorder.add_clips(clips)
        return clips

    def _safely(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do some of the monitor's work; an exception becomes a warning, once, unless `strict`, and the result None."""
        try:
            return work(*args)
        except Exception as error:
            if self.strict:
                raise
            self._warn(f"the monitor failed at step {self.count}, training goes on: ", first_line(error))

    def _warn(self, context: str, message: str = "") -> None:
        """Warn once per message."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(context + message, RuntimeWarning, stacklevel=3)

    def _check_folder(self) -> None:
        """Refuse a folder with records of a model with other heads."""
        recorded = Counter(head["name"].rpartition(".")[0] for head in self.recorder.heads)
        counts = {} if self.layers is None else self.layers.counts
        if counts and any(counts.get(name) != count for name, count in recorded.items()):
            raise ValueError(f"{self.recorder.path} has records of another model, {self.recorder.heads[0]['name']} …")

    def _check_clip(self, tau: float | None) -> None:
        if tau is None:
            return
        check_number("tau", tau)
        if tau <= 0:
            raise ValueError(f"tau must be above 0, got {tau}")
        if self.layers is None:
            raise ValueError(f"{self.name} cannot be clipped, its weights are not read: {self.unread}")


def _layers_of(model: nn.Module) -> tuple[Layers | None, str]:
    """The attention layers of a model, or None and why they cannot be read."""
    try:
        return Layers(read(model), model), ""
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # Any code outside of torch may have attention in it.
        if not any(looks_like_attention(m) or not type(m).__module__.startswith("torch.nn.") for m in model.modules()):
            raise ValueError(f"{type(model).__name__} has no attention module: there is nothing to monitor") from None
        if not all(weight.isfinite().all() for weight in model.parameters()):
            raise
        return None, first_line(error)


def _shared(model: nn.Module) -> bool:
    """Whether several processes train this model: DDP, or parameters sharded by `fully_shard`."""
    if not (is_available() and is_initialized()) or get_world_size() < 2:
        return False
    wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    return wrapped or any(hasattr(weight, "placements") for weight in model.parameters())


def _print(alarm: dict[str, Any]) -> None:
    print(f"keyquery: step {alarm['step']}: {alarm['reason']}", file=sys.stderr)
