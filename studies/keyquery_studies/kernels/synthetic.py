"""Two synthetic tasks with known ground truth: one attention head with the right kernel solves each exactly.

Inputs are the same in both. A token is x = Q(z, u): z on a sphere in four unknown directions, u noise in the others;
with every z its quarter turns Jz, −z and −Jz stand in the sequence too. Each token has a random label, and every token
is to tell the labels of the other ones, weighed by the truth:

    smoothing   by softmax(b·z·z'/4), which on a sphere is softmax(−b‖z − z'‖²/8): symmetric, an unknown metric
    look-up     by softmax(b·(Jz)·z'/4), the label of Jz, its successor, never of −Jz, its predecessor: skew

A symmetric form S cannot tell the two: (Jz)ᵀS J(Jz) = −zᵀS Jz, so if it is right about z, it is wrong about Jz.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from keyquery.layers import Attention
from keyquery.learn.training import Recipe, train
from keyquery.support.checks import check_choice, check_count
from keyquery_studies.common.store import result_name

TASKS = ("smoothing", "look-up")
WIDTH = 16  # of x
SEEN = 4  # directions of x that matter
HEAD = 8  # the head's r: a split kernel can hold either truth in its half
TOKENS = 16  # a sequence
SHARPNESS = 8.0  # b: a successor weighs e⁸ times as much as what is at right angles to it
NOISE = 1.0  # of the training targets, in standard deviations of the true ones
CHECKED = 0.25  # of the sequences are held back to stop early
BATCH = 32
TEST = 512  # fresh sequences without noise


@dataclass(frozen=True)
class Sequences:
    """Tokens, each with its label as last entry, and the target of every token."""

    tokens: Float[Tensor, "count n width"]
    targets: Float[Tensor, "count n"]

    def __getitem__(self, chosen: Any) -> Sequences:
        return Sequences(self.tokens[chosen], self.targets[chosen])

    def __len__(self) -> int:
        return len(self.tokens)


class Truth:
    """What is to be learned: the form M = b/4·QCQᵀ, C = I or Jᵀ on four directions, with Q drawn by the seed."""

    def __init__(self, task: str, seed: int) -> None:
        check_choice("task", task, TASKS)
        self.task = task
        random = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.directions = torch.linalg.qr(random).Q

    def form(self) -> Float[Tensor, "width width"]:
        """M of the true scores xᵀMx'."""
        seen = self.directions[:, :SEEN]
        core = torch.eye(SEEN, dtype=seen.dtype) if self.task == "smoothing" else turn().mT
        return seen @ core @ seen.mT * (SHARPNESS / SEEN)

    def draw(self, count: int, generator: torch.Generator, noise: float = 0.0) -> Sequences:
        """Fresh sequences; `noise` of the targets is in standard deviations."""
        normal = partial(torch.randn, generator=generator, dtype=torch.float64)
        z = normal(count, TOKENS // 4, SEEN)
        z = z / z.norm(dim=-1, keepdim=True) * math.sqrt(SEEN)
        turned = z @ turn().mT
        u = normal(count, TOKENS, WIDTH - SEEN)
        x = torch.cat((torch.cat((z, turned, -z, -turned), 1), u), -1) @ self.directions.mT
        labels = normal(count, TOKENS, 1)
        weights = (x @ self.form() @ x.mT).masked_fill(~others(), -math.inf).softmax(-1)
        targets = (weights @ labels).squeeze(-1)
        targets = targets + noise * targets.std() * normal(targets.shape)
        return Sequences(torch.cat((x, labels), -1).float(), targets.float())


class Teller(nn.Module):
    """One head with a kernel. Values are the labels themselves: the kernel is all there is to learn.

    Queries and keys see the label too, and have to find out that it does not matter.
    """

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.attention = Attention(WIDTH + 1, heads=1, kernel=kernel, head_dim=HEAD, bias=False)
        for layer, place in ((self.attention.value, (0, -1)), (self.attention.output, (-1, 0))):
            nn.init.zeros_(layer.weight).requires_grad_(False)[place] = 1.0

    def forward(self, tokens: Float[Tensor, "count n width"]) -> Float[Tensor, "count n"]:
        """The prediction of each token."""
        return self.attention(tokens, mask=others().expand(len(tokens), -1, -1))[..., -1]


@dataclass(frozen=True)
class Trial:
    """A kernel learns a task from `samples` sequences, those held back to stop early among them."""

    task: str
    kernel: str
    samples: int
    seed: int
    steps: int = 1000

    def __post_init__(self) -> None:
        check_choice("task", self.task, TASKS)
        check_count("samples", self.samples, least=2)

    @property
    def name(self) -> str:
        """The name of its result file."""
        design = (WIDTH, SEEN, HEAD, TOKENS, SHARPNESS, NOISE, CHECKED, BATCH, TEST)
        settings = {**asdict(self), "design": design, "recipe": asdict(self.recipe())}
        return result_name((self.task, self.kernel, self.samples, self.seed), settings)

    def recipe(self) -> Recipe:
        """How it is trained: until what was held back gets no better for 200 steps."""
        return Recipe(self.steps, lr=5e-3, warmup=20, schedule="flat+cosine", check_every=10, patience=20)

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """The error of a trained head; on the CPU, where a model this small is fastest."""
        truth, generator = Truth(self.task, self.seed), torch.Generator().manual_seed(self.seed + 1)
        test, data = truth.draw(TEST, generator), truth.draw(self.samples, generator, NOISE)
        checked = max(int(self.samples * CHECKED), 1)
        held_back, learned = data[:checked], data[checked:]
        torch.manual_seed(self.seed)
        model = Teller(self.kernel)

        def draw(step: int, generator: torch.Generator) -> Sequences:
            all_ = len(learned) <= BATCH
            return learned if all_ else learned[torch.randint(len(learned), (BATCH,), generator=generator)]

        def validate(model: nn.Module) -> float:
            return float(squared_error(model, held_back))

        log = train(model, draw, squared_error, self.recipe(), validate=validate)
        with torch.no_grad():
            error = float(squared_error(model, test) / squared_error(alike, test))
        return {**asdict(self), "error": error, "stopped_at": log.best_step}


def squared_error(model: Any, data: Sequences) -> Float[Tensor, ""]:
    """Mean squared error of a model's predictions."""
    return (model(data.tokens) - data.targets).square().mean()


def alike(tokens: Float[Tensor, "count n width"]) -> Float[Tensor, "count n"]:
    """The prediction of uniform attention: the mean of the others' labels."""
    return tokens[..., -1] @ (others().float() / (TOKENS - 1))


def turn() -> Float[Tensor, "seen seen"]:
    """J, a right angle in each of two planes: J² = −I."""
    return torch.kron(torch.tensor([[0.0, -1.0], [1.0, 0.0]]), torch.eye(SEEN // 2)).double()


def others() -> Bool[Tensor, "n n"]:
    """The mask: every token sees all but itself."""
    return ~torch.eye(TOKENS, dtype=torch.bool)
