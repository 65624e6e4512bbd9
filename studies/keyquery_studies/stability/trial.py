"""One training of the study `stability`: a small RoPE language model under a monitor, stable or not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.layers import Attention, LanguageModel, Shape
from keyquery.support.checks import check_choice, check_count
from keyquery_studies.common.language_models import begin

KERNELS = ("general", "symmetric", "split", "tied")
RECIPES = ("ramp", "hold")
WARMUP = 100  # steps of the recipe "hold"
LARGE = 3.0  # factor on the initial query and key weights of the recipe "hold"
BETAS = (0.9, 0.95)
DECAY = 0.0  # decay times a high rate would bound the weights, and so the logits
CLIP = 1.0  # global gradient norm


class NormedAttention(Attention):
    """`kq.Attention` with an RMS norm of each head's queries and keys (QK-norm), before RoPE."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.query_norm, self.key_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super()._project(x)
        return self.query_norm(query).to(value.dtype), self.key_norm(key).to(value.dtype), value


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A training. Recipes: "ramp" raises the learning rate linearly from 0 to `rate` over all steps, with float32
    weights; "hold" holds `rate` after a warm-up of 100 steps, starts with query and key weights 3 times as large, and
    rounds weights to bf16 after each step. On a GPU both compute under bf16 autocast. The seed is that of the weights
    and of the batches.
    """

    recipe: str
    rate: float
    seed: int
    text: str  # the digest of the corpus
    normed: bool = False
    kernel: str = "general"
    tau: float | None = None  # QK-Clip after every step
    steps: int = 1100
    vocabulary: int = 1024
    width: int = 256
    depth: int = 4
    heads: int = 4
    length: int = 128
    batch: int = 8
    every: int = 10

    def __post_init__(self) -> None:
        check_choice("recipe", self.recipe, RECIPES)
        check_choice("kernel", self.kernel, KERNELS)
        for name in ("steps", "width", "depth", "heads", "length", "batch", "every"):
            check_count(name, getattr(self, name))

    def settings(self) -> dict[str, Any]:
        """All that it is, for its row."""
        return asdict(self)

    @property
    def structure(self) -> tuple[Any, ...]:
        """Trials with the same can be trained side by side."""
        kernel = "general" if self.kernel == "tied" else self.kernel
        sizes = (self.steps, self.vocabulary, self.width, self.depth, self.heads, self.length, self.batch, self.every)
        return (kernel, self.normed, self.text, *sizes)

    def rate_at(self, step: int) -> float:
        """The learning rate of a step."""
        return self.rate * min((step + 1) / (self.steps if self.recipe == "ramp" else WARMUP), 1.0)

    def model(self) -> LanguageModel:
        """The model before training."""
        torch.manual_seed(self.seed)
        kernel = "general" if self.kernel == "tied" else self.kernel
        shape = Shape(self.vocabulary, self.width, self.depth, self.heads, self.length, True, kernel, rope=True)
        model = LanguageModel(shape)
        if self.kernel == "tied":
            begin(model, "matched")
        if self.normed:
            block: Any
            for block in model.body.blocks:
                old = block.attention
                block.attention = NormedAttention(self.width, self.heads, rope=old.rope)
                block.attention.load_state_dict(old.state_dict(), strict=False)
        if self.recipe == "hold":
            _enlarge(model)
        return model


@torch.no_grad()
def _enlarge(model: nn.Module) -> None:
    """Multiply the queries' and keys' weights; scores of kernels with one projection for both are quadratic in it."""
    for layer in model.modules():
        if isinstance(layer, Attention):
            for part in (layer.query, layer.key):
                if part is not None:
                    part.weight.mul_(LARGE)
