"""A language model by the start and kernel of its queries and keys, and the loss of many of them side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from keyquery.forms import Rope
from keyquery.layers import LanguageModel, Shape
from keyquery.support.checks import check_choice, check_count
from keyquery_studies.common.language_models import begin, tasks
from keyquery_studies.common.objectives import CAUSAL, OBJECTIVES, Task
from keyquery_studies.common.stacked import Weights, embed, linear, norm, split_heads, within
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

    def initial(self) -> Weights:
        """Its weights before training."""
        torch.manual_seed(self.seed)
        sizes = (self.vocabulary, self.width, self.depth, self.heads, self.length)
        model = LanguageModel(Shape(*sizes, CAUSAL[self.objective], **asdict(self.scores)))
        start_of(model, self.start)
        return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def start_of(model: torch.nn.Module, start: str) -> None:
    """Initialise queries and keys; "small tied" is "small" with Wq = Wk, scaled so that each head's ‖M‖ stays."""
    for init in ("small", "matched") if start == "small tied" else (start,):
        begin(model, init)


def losses(weights: Weights, run: StartRun, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every model on its own windows, (models, batch, n); targets of −100 are ignored."""
    models, batch, n = inputs.shape
    x = embed(weights["tokens.weight"], inputs)
    x = (x if run.scores.rope else x + weights["places.weight"][:, None, :n]).flatten(1, 2)
    for block in range(run.depth):
        own = within(weights, f"body.blocks.{block}.")
        normed = norm(own, "attention_norm", x)
        query, key, value = _attended(within(own, "attention."), run, normed, (batch, n))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=CAUSAL[run.objective])
        x = x + linear(own, "attention.output", mixed.transpose(1, 2).reshape(x.shape))
        x = x + linear(own, "mlp.2", gelu(linear(own, "mlp.0", norm(own, "mlp_norm", x))))
    logits = torch.bmm(norm(weights, "body.norm", x), weights["tokens.weight"].mT)
    each = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").unflatten(0, (models, -1))
    return each.sum(1) / (targets.flatten(1) != -100).sum(1).clamp(min=1)


def _attended(own: Weights, run: StartRun, x: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of every head, rotated if the model has rotary positions."""
    key, value = (split_heads(linear(own, name, x), shape, run.heads) for name in ("key", "value"))
    if run.scores.kernel == "general":
        query = split_heads(linear(own, "query", x), shape, run.heads)
    else:
        gain = own["shape.gain"].repeat_interleave(shape[0], 0).unsqueeze(-2)  # (models · batch, heads, 1, entries)
        query = constrained(key, gain, run.scores.kernel == "symmetric", run.scores.rope)
    if run.scores.rope:
        rope, places = Rope(run.width // run.heads), torch.arange(shape[1], device=x.device)
        query, key = rope.rotate(query, places), rope.rotate(key, places)
    return query, key, value


def constrained(z: Tensor, gain: Tensor, symmetric: bool, rope: bool) -> Tensor:
    """Queries from keys z: D z, or, of a split kernel, D z in the first dimensions and a quarter turn in the rest.

    With `rope`, dimension i and i + r/2 are a pair, with one entry of D.
    """
    gain = gain.to(z.dtype)
    if symmetric:
        return z * (torch.cat((gain, gain), -1) if rope else gain)
    size = gain.shape[-1]
    if not rope:
        first, second = z[..., size:].chunk(2, -1)
        return torch.cat((z[..., :size] * gain, -second, first), -1)
    first, second = z.chunk(2, -1)
    parts = (first[..., :size] * gain, -second[..., size:], second[..., :size] * gain, first[..., size:])
    return torch.cat(parts, -1)
