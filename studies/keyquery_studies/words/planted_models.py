"""Language models initialised from counts, for the study `words`: embeddings, scores and values."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import layer_norm

from keyquery.forms import Form
from keyquery.layers import Attention, LanguageModel, Shape
from keyquery.learn.cooccurrence.cooccurrence import Cooccurrence
from keyquery.learn.cooccurrence.counts import dealt
from keyquery.learn.training import Recipe, train
from keyquery.support.checks import check_choice, check_count
from keyquery_studies.common.language_models import begin, tasks
from keyquery_studies.common.objectives import HELD_OUT, OBJECTIVES
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.store import result_name

# What is planted, on top of what stands before it; `shuffled` is all of it, with the words changed among each other.
STARTS = ("random", "symmetric", "embeddings", "scores", "values", "shuffled")
PLANTED = {"embeddings": 1, "scores": 2, "values": 3, "shuffled": 3}
BATCH, CHECKS = 16, 20
WATCHED = 4  # batches of 32 windows for the validation loss
STD = 0.02  # of embeddings at random, and of those that are planted


@lru_cache(maxsize=2)
def counted(folder: Path, window: int) -> Cooccurrence:
    """Directed counts of the training tokens."""
    ids = np.load(folder / "tokens.npy").astype(np.int64)
    size = int(ids.max()) + 1
    return Cooccurrence.from_ids(ids[: int(len(ids) * (1 - HELD_OUT))], [str(word) for word in range(size)], window)


@lru_cache(maxsize=2)
def _near(folder: Path, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Symmetric PPMI with its eigendecomposition, and directed PPMI."""
    counts = counted(folder, window)
    near = counts.symmetric().dense("ppmi")
    values, vectors = torch.linalg.eigh(near)
    return near, values, vectors, counts.dense("ppmi")


@torch.no_grad()
def plant(model: LanguageModel, folder: Path, window: int, depth: int, order: Int[Tensor, " words"] | None) -> None:
    """Start a model from counts: its embeddings (`depth` 1), its scores too (2), and what its heads carry (3).

    Embeddings are the leading eigenvectors of PPMI, as large as those at random. With x the embeddings as a layer norm
    leaves them, each layer's heads are pieces of the M for which xMxᵀ is nearest to PPMI: of what stands near the query
    (masked), or before it (next token); values carry what stands near the key, or after it. Every head's map is as
    large as it was at random. With an `order`, words are changed among each other.
    """
    near, values, vectors, after = _near(folder, window)
    if order is not None:
        near, after, vectors = near[order][:, order], after[order][:, order], vectors[order]
    size, width = len(near), model.config.width
    lead = values.abs().argsort(descending=True)[:width]
    embeddings = vectors[:, lead] * values[lead].abs().sqrt()
    embeddings = torch.where(
        embeddings.abs().sum(1, keepdim=True) > 0, embeddings, torch.randn_like(embeddings)
    )  # never seen: the mask
    model.tokens.weight[:size] = (embeddings * STD / embeddings.std()).to(model.tokens.weight)
    if depth < 2:
        return
    x = layer_norm(embeddings, (width,))
    back = torch.linalg.pinv(x)
    looked, carried = (after.mT, after) if model.config.causal else (near, near)
    for layer in (module for module in model.modules() if isinstance(module, Attention)):
        assert layer.query is not None
        scores = _as_large(dealt(back @ looked @ back.mT, layer.heads, layer.head_dim), layer.form())
        layer.query.weight.copy_(scores.query.flatten(0, 1))
        layer.key.weight.copy_(scores.key.flatten(0, 1))
        if depth > 2:  # x Wvᵀ Woᵀ xᵀ
            carry = _as_large(dealt(back @ carried @ back.mT, layer.heads, layer.head_dim), layer.output_form())
            layer.value.weight.copy_(carry.query.flatten(0, 1))
            layer.output.weight.copy_(carry.key.flatten(0, 1).mT)


def _as_large(pieces: Form, before: Form) -> Form:
    """Rescale each head's form to the norm of another, both factors equally."""
    gain = (before.norm2.double() / pieces.norm2.clamp(min=1e-30)) ** 0.25
    return Form(pieces.query * gain[:, None, None], pieces.key * gain[:, None, None])


@dataclass(frozen=True, kw_only=True)
class PlantedTraining:
    """One small language model with one initialisation; everything else is the same."""

    objective: str
    start: str
    seed: int
    steps: int
    text: str  # the digest of the corpus
    vocabulary: int
    window: int = 5
    width: int = 64
    depth: int = 2
    heads: int = 4
    length: int = 64

    def __post_init__(self) -> None:
        check_choice("objective", self.objective, OBJECTIVES)
        check_choice("start", self.start, STARTS)
        check_count("steps", self.steps)

    @property
    def name(self) -> str:
        """The name of its result file."""
        settings = {**asdict(self), "batch": BATCH, "watched": WATCHED, "recipe": asdict(self.recipe())}
        return result_name((self.objective, self.start, self.seed), settings)

    def recipe(self) -> Recipe:
        """AdamW with warm-up and a constant rate, so that curves do not depend on the number of steps."""
        every = max(self.steps // CHECKS, 1)
        options: dict[str, Any] = {"schedule": "flat", "weight_decay": 0.1, "check_every": every}
        return Recipe(self.steps, lr=2e-3, warmup=min(20, self.steps // 4), seed=self.seed, **options)

    def shape(self) -> Shape:
        """The shape of the model."""
        return Shape(
            vocab_size=self.vocabulary,
            width=self.width,
            depth=self.depth,
            num_attention_heads=self.heads,
            length=self.length,
            causal=self.objective == "next token",
        )

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train, with validation losses."""
        task, exam = tasks(folder, device, self.objective, self.length)
        task.batch, task.held_out = BATCH, task.held_out[:WATCHED]
        torch.manual_seed(self.seed)
        model = LanguageModel(self.shape())
        self.plant(model, folder)
        model = model.to(device)
        curve = [[0, task.validate(model)]]
        start = perf_counter()
        log = train(model, task.draw, task.loss, self.recipe(), validate=task.validate)
        curve += [[int(row["step"]), row["validation"]] for row in log.rows]
        row = {**asdict(self), "batch": BATCH, "loss": exam.validate(model), "curve": curve}
        if not all(math.isfinite(loss) for _, loss in curve):
            raise FloatingPointError(f"{self.start}, seed {self.seed}: the loss is not finite")
        return {**row, "seconds": perf_counter() - start, "device": device_name(device)}

    def plant(self, model: LanguageModel, folder: Path) -> None:
        """Initialise a freshly built model."""
        if self.start == "symmetric":
            begin(model, "matched")
        elif self.start in PLANTED:
            order = None
            if self.start == "shuffled":
                size = len(counted(folder, self.window))
                order = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed))
            plant(model, folder, self.window, PLANTED[self.start], order)
