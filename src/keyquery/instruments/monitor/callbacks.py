"""A monitor as a callback of the transformers Trainer and of Lightning."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from keyquery.support.extras import optional


def trainer_callback(monitor: Any, tau: float | None) -> Any:
    """A TrainerCallback that counts optimiser steps, logs records, and clips heads if tau is given."""
    transformers = optional("transformers", "callback")

    class Watch(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        trainer: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.trainer = _caller(transformers.Trainer)
            if state.global_step:
                monitor.resume(state.global_step)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            monitor.gradients()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            _stepped(monitor, tau)
            wanted = control.should_log
            for row in monitor.summaries() if self.trainer is not None else ():
                self.trainer.log(row)
            control.should_log = wanted  # which a log resets

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if logs and "loss" in logs:
                monitor.add_loss(logs["loss"])

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            monitor.close()

    return Watch()


def lightning_callback(monitor: Any, tau: float | None) -> Any:
    """A Lightning callback that counts optimiser steps, logs records, and clips heads if tau is given."""
    former = find_spec("pytorch_lightning") and not find_spec("lightning")
    base = optional("pytorch_lightning" if former else "lightning.pytorch", "lightning()").Callback

    class Watch(base):  # type: ignore[misc, valid-type]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if trainer.global_step:
                monitor.resume(trainer.global_step)

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimiser: Any) -> None:
            monitor.gradients()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *more: Any) -> None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if loss is not None:  # Lightning has divided it by the number of batches of a step
                monitor.add_loss(loss * trainer.accumulate_grad_batches)
            if trainer.global_step > monitor.count:  # not while gradients are accumulated
                _stepped(monitor, tau)
            for row in monitor.summaries():
                module.log_dict(row)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            monitor.close()

    return Watch()


def _stepped(monitor: Any, tau: float | None) -> None:
    monitor.step()
    if tau is not None:
        monitor.clip(tau)


def _caller(kind: type) -> Any:
    """The object of a class whose method is running: a Trainer does not give itself to its callbacks."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), kind):
            return owner
        frame = frame.f_back
    return None
