"""A monitor as a callback of the transformers Trainer and of Lightning."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from keyquery.support.extras import optional


def trainer_callback(monitor: Any, tau: float | None) -> Any:
    """A TrainerCallback that counts optimiser steps, and clips heads if tau is given."""
    base = optional("transformers", "callback").TrainerCallback

    class Watch(base):  # type: ignore[misc, valid-type]
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step:
                monitor.resume(state.global_step)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            monitor.gradients()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            _stepped(monitor, tau)

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            monitor.close()

    return Watch()


def lightning_callback(monitor: Any, tau: float | None) -> Any:
    """A Lightning callback that counts optimiser steps, and clips heads if tau is given."""
    former = find_spec("pytorch_lightning") and not find_spec("lightning")
    base = optional("pytorch_lightning" if former else "lightning.pytorch", "lightning()").Callback

    class Watch(base):  # type: ignore[misc, valid-type]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if trainer.global_step:
                monitor.resume(trainer.global_step)

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimiser: Any) -> None:
            monitor.gradients()

        def on_train_batch_end(self, trainer: Any, module: Any, *more: Any) -> None:
            if trainer.global_step > monitor.count:  # not while gradients are accumulated
                _stepped(monitor, tau)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            monitor.close()

    return Watch()


def _stepped(monitor: Any, tau: float | None) -> None:
    monitor.step()
    if tau is not None:
        monitor.clip(tau)
