"""A language model by the start and kernel of its queries and keys, and the loss of many of them side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from keyquery.layers import LanguageModel, Shape
from keyquery.support.checks import check_choice, check_count
from keyquery_studies.common.language_models import begin, tasks
from keyquery_studies.common.objectives import CAUSAL, OBJECTIVES, Task
from keyquery_studies.common.stacked import Weights, side_by_side
from keyquery_studies.common.store import result_name

KERNELS = ("general", "symmetric", "split")
STARTS = ("default", "tied", "matched", "small", "small tied")


@dataclass(frozen=True)
class Scores:
    """What a model scores by: the kernel of its heads, and rotary in place of learned positions."""

    kernel: str = "general"
    rope: bool = False


@dataclass(frozen=True, kw_only=True)
class StartRun:
    """One model, with an unconstrained kernel and learned positions."""

    objective: str
    start: str
    lr: float
    seed: int
    text: str  # digest of the corpus
    vocabulary: int = 512
    steps: int = 8000
    width: int = 64
    depth: int = 2
    heads: int = 4
    length: int = 64
    batch: int = 32

    def __post_init__(self) -> None:
        check_choice("objective", self.objective, OBJECTIVES)
        check_choice("start", self.start, STARTS)
        for name in ("steps", "width", "depth", "heads", "length", "batch"):
            check_count(name, getattr(self, name))

    @property
    def name(self) -> str:
        """The name of its result file."""
        return result_name((self.objective, self.start, self.lr, self.seed), asdict(self))

    @property
    def scores(self) -> Scores:
        """What it scores by."""
        return Scores()

    def tasks(self, folder: Path, device: str) -> tuple[Task, Task]:
        """Training and validation, and the test; `folder` has the tokens."""
        return tasks(folder, device, self.objective, self.length, batch=self.batch)

    def shape(self) -> Shape:
        """The shape of the model."""
        sizes = (self.vocabulary, self.width, self.depth, self.heads, self.length)
        return Shape(*sizes, CAUSAL[self.objective], **asdict(self.scores))

    def initial(self) -> Weights:
        """Its weights before training."""
        torch.manual_seed(self.seed)
        model = LanguageModel(self.shape())
        start_of(model, self.start)
        return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def start_of(model: torch.nn.Module, start: str) -> None:
    """Initialise queries and keys; "small tied" is "small" with Wq = Wk, scaled so that each head's ‖M‖ stays."""
    for init in ("small", "matched") if start == "small tied" else (start,):
        begin(model, init)


def losses(weights: Weights, run: StartRun, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every model on its own windows, (models, batch, n); targets of −100 are ignored."""
    return _losses_of(run.shape())(weights, inputs, targets)


@lru_cache(maxsize=4)
def _losses_of(shape: Shape) -> Callable[[Weights, Tensor, Tensor], Tensor]:
    return side_by_side(LanguageModel(shape), _loss)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    each = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return each.sum() / (targets != -100).sum().clamp(min=1)
