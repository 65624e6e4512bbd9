"""`train`: the training loop of all models in keyquery."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
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
Validate = Callable[[nn.Module], float | Mapping[str, float]]


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

    rows: list[dict[str, float]] = field(default_factory=list)  # step, mean loss and validation metrics
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
    validate: Validate | None = None,
    after: Callable[[int, nn.Module], None] = lambda step, model: None,
    until: Callable[[int], bool] = lambda step: False,
    checkpoint: str | Path | None = None,
    board: str | Path | None = None,
    progress: Progress | None = None,
    verbose: bool = False,
) -> Log:
    """Train a model in place and return the log. Under torchrun, gradients are averaged over processes.

    `draw(step, generator)` is the batch of a step, its generator seeded by seed, step and process; `loss(model, batch)`
    a scalar. `validate(model)` is the validation loss, or metrics of which `validation` is that loss: the best weights
    are kept, and `recipe.patience` stops early. `after(step, model)` is called before the first step (0) and after
    each, `until(step)` too: True interrupts the run and keeps its `checkpoint`, a file that is written every
    `check_every` steps, resumed from if it exists, and deleted at the end. `board` is a folder for TensorBoard (the
    extra `board`), by default the environment variable KEYQUERY_TENSORBOARD. `progress` wraps iterables in progress
    bars; `verbose` prints every row of the log to stderr, if that is no terminal.

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
    run = _Run(model, optimiser, recipe, validate, rank, checkpoint if checkpoint is None else Path(checkpoint))
    first = run.restore()
    run.board = open_board(board, run.path, recipe.seed, rank, first)
    run.verbose = verbose and rank == 0 and not sys.stderr.isatty()
    if first == 0:
        after(0, model)
    steps: Iterable[int] = () if until(first) else range(first, recipe.steps)
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
        after(done, model)
        model.train()
        if done % recipe.check_every == 0 or done == recipe.steps:
            run.note(done)
        if run.log.stopped or until(done):
            break
    run.finish(done)
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
    recipe: Recipe
    validate: Validate | None
    rank: int
    path: Path | None
    log: Log = field(default_factory=Log)
    best: dict[str, Tensor] | None = None
    recent: list[Tensor] = field(default_factory=list)  # losses since the last check
    board: Board | None = None
    verbose: bool = False

    def note(self, step: int) -> None:
        mean = torch.stack(self.recent).mean()
        self.recent = []
        if is_initialized():
            all_reduce(mean, ReduceOp.SUM)
            mean = mean / get_world_size()
        row = {"step": float(step), "loss": float(mean)}
        if not mean.isfinite():
            raise FloatingPointError(f"the loss is {mean.item()} at step {step}: a smaller lr, or clip, may help")
        if self.validate is not None:
            row |= self._validated(step, self.validate)
            since = (step - self.log.best_step) / self.recipe.check_every
            self.log.stopped = self.recipe.patience is not None and since >= self.recipe.patience
        self.log.rows.append(row)
        if self.board is not None:
            self.board.tell(row, self.optimiser.param_groups[0]["lr"])
        if self.verbose:
            metrics = ", ".join(f"{name} {value:.4f}" for name, value in row.items() if name != "step")
            print(f"step {step} of {self.recipe.steps}: {metrics}", file=sys.stderr, flush=True)
        self._save(step)

    def _validated(self, step: int, validate: Validate) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad():
            result = validate(self.model)
        self.model.train()
        metrics = dict(result) if isinstance(result, Mapping) else {"validation": float(result)}
        if metrics["validation"] < self.log.best:
            self.log.best, self.log.best_step = metrics["validation"], step
            self.best = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        return metrics

    def _save(self, step: int) -> None:
        if self.path is None or self.rank > 0:
            return
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
            if state["recipe"] == asdict(self.recipe):
                self.log, self.best, self.recent = Log(**state["log"]), state["best"], state["recent"]
                self.model.load_state_dict(state["model"])
                self.optimiser.load_state_dict(state["optimiser"])
                return int(state["step"])
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            reason = f"{self.path} is not a complete checkpoint of this model: {first_line(error)}"
            raise ValueError(f"{reason}: delete it to restart") from None
        raise ValueError(f"{self.path} was written with another recipe: delete it to restart, or use that recipe")

    def finish(self, step: int) -> None:
        if self.board is not None:
            self.board.close()
        if self.recent:  # interrupted between two checks
            self._save(step)
        if self.best is not None:
            self.model.load_state_dict(self.best)
        self.model.eval()
        if self.rank == 0 and self.path is not None and (self.log.stopped or step == self.recipe.steps):
            self.path.unlink(missing_ok=True)
