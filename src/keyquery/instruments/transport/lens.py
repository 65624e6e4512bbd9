"""`TransportLens`: follows what a module gives for the same inputs through training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from keyquery.capture.probe import Probe, device_of
from keyquery.forms.coupling import EXACT, check_installed
from keyquery.instruments.transport.head_energies import Energies
from keyquery.instruments.transport.path import ends
from keyquery.instruments.transport.store import Store
from keyquery.instruments.transport.transport import FRAMES, POINTS, Transport, frames_of, measured
from keyquery.reading import provenance
from keyquery.support.checks import check_count
from keyquery.support.extras import optional
from keyquery.support.progress import Progress


class TransportLens:
    """Follows the points that a module of a model gives for `inputs`, from now on, until training ends.

    `module` is a name, such as "encoder.blocks.0", or a module of the model itself; the model's own output unless
    given. `inputs` is a batch, or a list of them: a tensor, a tuple or a mapping, as the model takes it; `labels` name
    the class of each instance. Of outputs (batch, tokens, width), `tokens` are taken: "all" real ones, the "first", the
    "last", their "mean", a position or several. Of all points `points` are kept, drawn by `seed`; they lie on disk as
    float16, in `folder` or where temporary files do. The start is recorded here, and then

    - `lens.step()` in the training loop records after each epoch, or, if `every` is a number, after as many calls;
    - `with lens:` around any training records after every so many steps of its optimiser, if `every` is a number, and
      after the last;
    - `lens.callback()` does either in the Trainer of transformers.

    A record runs `inputs` in eval mode, without gradients, and leaves modes, random states and buffers as they were. It
    also takes the symmetric and the skew energy of every attention head, where the model can be read; `heads=False`
    leaves that out. Needs the extra `transport`.

    >>> model, x = torch.nn.Linear(2, 2), torch.randn(8, 2)
    >>> lens = kq.TransportLens(model, inputs=x)
    >>> for epoch in range(3):
    ...     _ = model.weight.data.mul_(0.5)                     # training
    ...     lens.step()
    >>> reading = lens.reading()
    >>> reading.steps, round(reading.efficiency, 6)             # every point went straight ahead
    ([0, 1, 2, 3], 1.0)
    """

    def __init__(
        self,
        model: nn.Module,
        module: str | nn.Module = "",
        *,
        inputs: Any,
        labels: Any = None,
        every: int | str = "epoch",
        tokens: str | int | Sequence[int] = "all",
        points: int | None = 2000,
        heads: bool = True,
        seed: int = 0,
        folder: str | Path | None = None,
        name: str | None = None,
    ) -> None:
        check_count("points", points, optional=True)
        check_count("seed", seed, least=0)
        if every != "epoch":
            if isinstance(every, str):
                raise ValueError(f"every must be 'epoch' or a number of steps, got {every!r}")
            check_count("every", every)
        self.every, self.count = every, 0
        self.probe = Probe(model, module, inputs, tokens)
        self.name = name or type(self.probe.model).__name__
        start = self._points("the start")
        self._all = len(start)
        drawn = torch.randperm(self._all, generator=torch.Generator().manual_seed(seed))
        self._kept = drawn[: points or self._all].sort().values
        check_installed(len(self._kept))  # now, not after hours of training
        self.labels = self._labels(labels)
        self.store = Store(start[self._kept], folder, device_of(self.probe.model))
        self._energies = Energies(self.probe.model) if heads else None
        if self._energies is not None:
            self._energies.add()
        self._hook: Any = None
        self._optimiser: Optimizer | None = None

    @property
    def steps(self) -> list[int]:
        """Steps, or epochs, that are recorded; 0 is the start."""
        return list(self.store.steps)

    @property
    def unit(self) -> str:
        """What is counted: "epoch" or "step"."""
        return "epoch" if self.every == "epoch" else "step"

    @property
    def heads(self) -> list[dict[str, Any]]:
        """One row per head: symmetric and skew energy and symmetry at every record, and `since` when it is skew.

        `since` is the first recorded step from which on its symmetry stays at −0.1 or below; None if it ends above.
        """
        return [] if self._energies is None else self._energies.told(range(len(self.steps)), self.steps)

    def step(self) -> None:
        """Tell the lens that an epoch, or a step, is over: it records if it is the turn of this one."""
        if self._hook is not None:
            raise ValueError("inside `with lens` the optimiser tells its steps: leave out lens.step()")
        self._count()

    def path(self) -> Tensor:
        """Places of all points at every record, (records, points, width), float32."""
        return torch.stack([self.store.place(record).float() for record in range(len(self.steps))])

    def reading(
        self,
        published: bool = False,
        *,
        frames: int = FRAMES,
        points: int = POINTS,
        exact_limit: int = EXACT,
        progress: Progress | None = None,
    ) -> Transport:
        """What `kq.transport` says of the path so far, with curves over steps and the heads; options are its own."""
        if len(self.steps) < 2:
            seen = f" after {self.count} of {self.every} steps" if self.count else ""
            ways = "call lens.step() after each epoch, or give every=100 and train inside `with lens`"
            raise ValueError(f"the lens has recorded the start alone{seen}: {ways}")
        last = len(self.steps) - 1
        shown = frames_of(last, frames)
        heads = [] if self._energies is None else self._energies.told(shown, self.steps)
        facts: dict[str, Any] = {
            "records": last + 1,
            "every": self.every,
            "points": f"{len(self._kept)} of {self._all}",
            "tensors": ends(self.store),
        }
        if self._energies is not None and self._energies.missing:
            facts["heads"] = f"not read: {self._energies.missing}"
        model = {"name": self.name, "module": self.probe.module}
        told = {"model": model, "unit": self.unit, "heads": heads, "provenance": provenance(**facts)}
        return measured(self.store, self.labels, published, frames, points, exact_limit, progress, told)

    def callback(self) -> Any:
        """A TrainerCallback that records after each epoch, or every so many steps of the optimiser (extra `hf`)."""
        base = optional("transformers", "callback").TrainerCallback
        lens = self

        class Recorder(base):  # type: ignore[misc, valid-type]
            def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                if lens.every == "epoch":
                    lens.step()

            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                if lens.every != "epoch":
                    lens.step()

        return Recorder()

    def __enter__(self) -> TransportLens:
        if self.every != "epoch":
            self._hook = register_optimizer_step_post_hook(self._stepped)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
            if kind is None and self.count > self.steps[-1]:
                self._record()  # the end of training, whichever step it is
        self._hook = self._optimiser = None

    def _stepped(self, optimiser: Optimizer, *given: Any) -> None:
        """After a step of any optimiser: the first that has a parameter of the model is the one that counts."""
        if self._optimiser is None:
            own = {id(weight) for weight in self.probe.model.parameters()}
            if any(id(weight) in own for group in optimiser.param_groups for weight in group["params"]):
                self._optimiser = optimiser
        if optimiser is self._optimiser:
            self._count()

    def _count(self) -> None:
        self.count += 1
        if self.every == "epoch" or self.count % int(self.every) == 0:
            self._record()

    def _record(self) -> None:
        when = f"{self.unit} {self.count}"
        place = self._points(when)
        if len(place) != self._all:
            then, now = f"{self._all} points at the start", f"{len(place)} at {when}"
            raise ValueError(f"{self.probe.module or self.name} must give the same points again: {then}, {now}")
        self.store.add(self.count, place[self._kept])
        if self._energies is not None:
            self._energies.add()

    def _points(self, when: str) -> Tensor:
        points = self.probe()
        bad = int((~points.isfinite()).any(-1).sum())
        if bad:
            called = self.probe.module or type(self.probe.model).__name__
            raise ValueError(f"{called} gives NaN or infinite values at {when}, for {bad} of {len(points)} points")
        return points

    def _labels(self, labels: Any) -> np.ndarray | None:
        """The class of every point that is kept."""
        if labels is None:
            return None
        array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
        if array.shape != (self.probe.instances,):
            shape, count = array.shape, self.probe.instances
            raise ValueError(f"labels must name the class of each of {count} instances in inputs, got shape {shape}")
        return array[self.probe.owners[self._kept].numpy()]
