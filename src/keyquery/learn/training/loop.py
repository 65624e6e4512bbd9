"""`train`: the training loop of all models in keyquery."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce, get_rank, get_world_size, init_process_group, is_initialized
from torch.nn.parallel import DistributedDataParallel

from keyquery.checkpoints.formats.torch_files import load_pickled
from keyquery.learn.training.optimisers import OPTIMISERS, SCHEDULES, make_optimiser, schedule
from keyquery.support.checks import check_choice, check_count, environment_count
from keyquery.support.files import writing
from keyquery.support.printable import first_line
from keyquery.support.progress import Progress, silent
from keyquery.support.tensorboard import Board, open_board

Draw = Callable[[int, torch.Generator], Any]
Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Recipe:
    """Training hyperparameters: everything but the model, the data and the loss."""

    steps: int  # of the optimiser
    lr: float = 1e-3  # peak learning rate
    optimiser: str = "adamw"  # "adamw", "radam" or "npt" (LAMB with Lookahead)
    schedule: str = "cosine"  # "cosine", "linear", "flat" or "flat+cosine"
    warmup: int = 100  # steps of linear warmup
    weight_decay: float = 0.01  # decoupled
    flat: float = 0.7  # share of constant steps before the cosine of "flat+cosine"
    clip: float | None = 1.0  # global gradient norm
    clip_each: float | None = None  # elementwise
    seed: int = 0  # of batches and initial states
    bf16: bool | None = None  # None: on a GPU
    check_every: int = 100  # steps between validations, log lines and checkpoints
    patience: int | None = None  # validations without improvement before training stops

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("warmup", 0), ("check_every", 1), ("seed", 0)):
            check_count(name, getattr(self, name), least=least)
        check_count("patience", self.patience, optional=True)
        for name in ("lr", "weight_decay", "clip", "clip_each"):
            if (value := getattr(self, name)) is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number ≥ 0, got {value}")
        if not 0 <= self.flat < 1:
            raise ValueError(f"flat must be from 0 to below 1, got {self.flat}")
        check_choice("optimiser", self.optimiser, OPTIMISERS)
        check_choice("schedule", self.schedule, SCHEDULES)


@dataclass
class Log:
    """The log of a run: one row per `check_every` steps, and the best validation."""

    rows: list[dict[str, float]] = field(default_factory=list)  # losses, validation metrics and learning rates by step
    best: float = float("inf")  # lowest validation loss
    best_step: int = 0  # its step
    stopped: bool = False  # whether `patience` ended the run
    interrupted: bool = False  # whether Ctrl-C ended the fit of an estimator


def train(
    model: nn.Module,
    draw: Draw,
    loss: Loss,
    recipe: Recipe,
    *,
    validate: Callable[[nn.Module], float] | None = None,
    after: Callable[[int, nn.Module], None] | None = None,
    until: Callable[[int], bool] | None = None,
    checkpoint: str | Path | None = None,
    spare: bool = False,
    board: str | Path | None = None,
    progress: Progress | None = None,
) -> Log:
    """Train a model in place and return the log. Under torchrun, gradients are averaged over processes.

    Parameters
    ----------
    model
        The model, trained in place.
    draw
        `draw(step, generator)` returns the batch of a step; the generator is seeded by seed, step and process.
    loss
        `loss(model, batch)` is a scalar.
    recipe
        Hyperparameters.
    validate
        The validation loss of a model: the best weights are kept, and `recipe.patience` stops early. Default: none.
    after
        `after(step, model)` is called before the first step (0) and after each. Default: none.
    until
        `until(step)` is called before the first step and after each: True interrupts the run and keeps its checkpoint.
        Default: never.
    checkpoint
        A file: written every `check_every` steps, resumed from if it exists, deleted at the end. Default: none.
    spare
        Write the checkpoint only on an interrupt, since that of a large model takes gigabytes.
    board
        A folder for TensorBoard (the extra `board`). Default: the environment variable KEYQUERY_TENSORBOARD.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    Log
        Losses, validation metrics and learning rates by step.

    Examples
    --------
    >>> model = torch.nn.Linear(2, 1)
    >>> draw = lambda step, generator: torch.randn(32, 2, generator=generator)
    >>> log = train(model, draw, lambda m, x: (m(x) - x.sum(1, keepdim=True)).square().mean(), Recipe(200, lr=0.05))
    >>> log.rows[-1]["loss"] < 1e-2
    True
    """
    device = next(model.parameters()).device
    running, rank = _distributed(model, device)
    optimiser = make_optimiser(recipe.optimiser, model, recipe.lr, recipe.weight_decay)
    run = _Run(model, optimiser, Log(), None if checkpoint is None else Path(checkpoint), recipe, spare)
    first = run.restore()
    run.board = open_board(board, run.path, recipe.seed, rank, first)
    if after is not None and first == 0:
        after(0, model)
    steps: Iterable[int] = () if until is not None and until(first) else range(first, recipe.steps)
    if rank == 0:
        steps = (progress or silent)(steps, "training", recipe.steps - first)
    generator, done = torch.Generator(), first
    model.train()
    for step in steps:
        number = ((recipe.seed * 1_000_003 + rank) << 24) + step
        # For dropout, also after a resume; on a CPU its own generator only, since seeding an unused GPU is slow.
        (torch.default_generator if device.type == "cpu" else torch).manual_seed(number)
        generator.manual_seed(number)
        run.recent.append(_step(running, optimiser, draw(step, generator), loss, recipe, step))
        done = step + 1
        if after is not None:
            after(done, model)
            model.train()
        if done % recipe.check_every == 0 or done == recipe.steps:
            run.note(done, validate, rank)
        if run.log.stopped or (until is not None and until(done)):
            break
    run.finish(done, validate is not None, rank)
    return run.log


def _step(model: nn.Module, optimiser: Any, batch: Any, loss: Loss, recipe: Recipe, step: int) -> Tensor:
    """One update; the loss stays on its device, since reading it would synchronise with the GPU."""
    device = next(model.parameters()).device
    factor = schedule(recipe.schedule, step, recipe.steps, recipe.warmup, recipe.flat)
    for group in optimiser.param_groups:
        group["lr"] = recipe.lr * factor
    short = device.type == "cuda" if recipe.bf16 is None else recipe.bf16
    with torch.autocast(device.type, torch.bfloat16, enabled=short):
        value = loss(model, batch)
    optimiser.zero_grad(set_to_none=True)
    value.backward()
    if recipe.clip_each is not None:
        nn.utils.clip_grad_value_(model.parameters(), recipe.clip_each)
    if recipe.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    optimiser.step()
    return value.detach()


def _distributed(model: nn.Module, device: torch.device) -> tuple[nn.Module, int]:
    """The model wrapped for torchrun, and this process's rank."""
    if environment_count("WORLD_SIZE", 1) <= 1:
        return model, 0
    if not is_initialized():
        init_process_group("nccl" if device.type == "cuda" else "gloo")
    return DistributedDataParallel(model), get_rank()


@dataclass
class _Run:
    """The state of a run between checks, as stored in a checkpoint."""

    model: nn.Module
    optimiser: Any
    log: Log
    path: Path | None
    recipe: Recipe
    spare: bool = False
    best: dict[str, Tensor] | None = None
    recent: list[Tensor] = field(default_factory=list)  # losses since the last check
    board: Board | None = None

    def note(self, step: int, validate: Callable[[nn.Module], float] | None, rank: int) -> None:
        recipe = self.recipe
        mean = torch.stack(self.recent).mean()
        self.recent = []
        if is_initialized():
            all_reduce(mean, ReduceOp.SUM)
            mean = mean / get_world_size()
        row = {"step": float(step), "loss": float(mean)}
        if not mean.isfinite():
            raise FloatingPointError(f"the loss is {mean.item()} at step {step}: a smaller lr, or clip, may help")
        if validate is not None:
            row["validation"] = self._validated(step, validate)
            since = (step - self.log.best_step) / recipe.check_every
            self.log.stopped = recipe.patience is not None and since >= recipe.patience
        self.log.rows.append(row)
        if self.board is not None:
            self.board.tell(row, self.optimiser.param_groups[0]["lr"])
        if rank == 0 and self.path is not None and not self.spare:
            self._save(step)

    def _validated(self, step: int, validate: Callable[[nn.Module], float]) -> float:
        self.model.eval()
        with torch.no_grad():
            value = float(validate(self.model))
        self.model.train()
        if value < self.log.best:
            self.log.best, self.log.best_step = value, step
            self.best = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        return value

    def _save(self, step: int) -> None:
        assert self.path is not None
        state = {"step": step, "model": self.model.state_dict(), "optimiser": self.optimiser.state_dict()}
        state |= {"log": vars(self.log), "best": self.best, "recipe": asdict(self.recipe), "recent": self.recent}
        with writing(self.path) as part:
            torch.save(state, part)

    def restore(self) -> int:
        """The step to resume from."""
        if self.path is None or not self.path.exists():
            return 0
        try:
            state = load_pickled(self.path, next(self.model.parameters()).device)
            same, step, log = state["recipe"] == asdict(self.recipe), int(state["step"]), Log(**state["log"])
            best, recent = state["best"], state["recent"]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{self.path} is not a complete checkpoint: delete it to restart") from None
        if not same:
            raise ValueError(f"{self.path} was written with another recipe: delete it to restart, or use that recipe")
        try:
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{self.path} does not fit the model: {first_line(error)}") from None
        self.log, self.best, self.recent = log, best, recent
        return step

    def finish(self, step: int, validated: bool, rank: int) -> None:
        if self.board is not None:
            self.board.close()
        whole = self.log.stopped or step == self.recipe.steps
        lost = self.recent or (self.spare and not whole and step > 0)  # interrupted between two checks, or none written
        if rank == 0 and self.path is not None and lost:
            self._save(step)
        if validated and self.best is not None:
            self.model.load_state_dict(self.best)
        self.model.eval()
        if rank == 0 and self.path is not None and whole:
            self.path.unlink(missing_ok=True)
