"""Two-layer attention-only models, trained side by side through the phase change in which induction heads form.

All seeds are trained in one batched computation: every weight has a leading dimension of seeds. `AttentionOnly` is the
same model for one seed, as the instruments read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.forms import Rope
from keyquery.layers import Attention
from keyquery_studies.common.stacked import side_by_side

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """Of the models."""

    vocabulary: int = 32
    width: int = 64
    depth: int = 2
    heads: int = 4

    @property
    def rope(self) -> Rope:
        """Of each head."""
        return Rope(self.width // self.heads)


@dataclass(frozen=True)
class Plan:
    """Of the training."""

    seeds: int = 5
    batch: int = 16
    length: int = 40
    rate: float = 3e-3
    warmup: int = 50
    decay: float = 0.01
    clip: float = 1.0
    # Steps at which the models are kept.
    kept: Sequence[int] = (0, 400, 700, 800, 900, 1000, 1100, 1200, 1500)


class AttentionOnly(nn.Module):
    """Embeddings, residual attention layers without MLPs, and an output projection; norms have no parameters."""

    is_causal = True

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(
            Attention(size.width, size.heads, bias=False, rope=size.rope) for _ in range(size.depth)
        )
        self.norm = nn.LayerNorm(size.width, elementwise_affine=False)
        self.unembed = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, input_ids: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n vocabulary"]:
        """Logits of every token."""
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = x + layer(self.norm(x), is_causal=True)
        return self.unembed(self.norm(x))


def initial(size: Size, seeds: int) -> Weights:
    """Weights of all seeds, named as in `AttentionOnly`: normal, of standard deviation 1/√width.

    Embeddings have 1 and output projections 0.02, so that layers start as small additions to the tokens.
    """
    shapes = {name: tuple(weight.shape) for name, weight in AttentionOnly(size).state_dict().items()}
    stacks: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            std = 1.0 if name == "tokens.weight" else 0.02 if "output" in name else size.width**-0.5
            stacks[name].append(std * torch.randn(shape, generator=generator))
    return {name: torch.stack(each) for name, each in stacks.items()}


def loss(weights: Mapping[str, Tensor], size: Size, ids: Int[Tensor, "seeds batch n"]) -> Float[Tensor, " seeds"]:
    """Next-token cross-entropy of every model on its own sequences, in nats."""
    return side_by_side(AttentionOnly(size), _loss)(weights, ids, ids)


def _loss(predicted: Float[Tensor, "batch n vocabulary"], ids: Int[Tensor, "batch n"]) -> Float[Tensor, ""]:
    return cross_entropy(predicted[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def passages(size: Size, plan: Plan, rows: int, generator: torch.Generator) -> Int[Tensor, "rows n"]:
    """Sequences of one random passage of 6 to 12 tokens, again and again, with 0 to 8 other random tokens between.

    Repeats are at no fixed distance, so that no head can copy by position alone: 6 to 20 tokens apart, and another
    distance at each repeat.
    """
    lengths = torch.randint(6, 13, (rows,), generator=generator).tolist()
    starts = torch.randint(0, 9, (rows,), generator=generator).tolist()
    ids = torch.randint(size.vocabulary, (rows, plan.length), generator=generator)
    gaps = torch.randint(0, 9, (rows, plan.length), generator=generator).tolist()
    for row, (length, at) in enumerate(zip(lengths, starts, strict=True)):
        passage = torch.randperm(size.vocabulary, generator=generator)[:length]
        repeat = 0
        while at < plan.length:
            end = min(at + length, plan.length)
            ids[row, at:end] = passage[: end - at]
            at, repeat = end + gaps[row][repeat], repeat + 1
    return ids


def train(
    size: Size, plan: Plan, device: str = "cpu", late: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, Weights, Tensor]]:
    """Step, weights and mean losses since the last one, by seed, at the steps to be kept.

    A run that is `late` ends early, with its last step.
    """
    weights = {name: weight.to(device).requires_grad_() for name, weight in initial(size, plan.seeds).items()}
    optimizer = torch.optim.AdamW(list(weights.values()), plan.rate, (0.9, 0.98), weight_decay=plan.decay)
    generator = torch.Generator().manual_seed(0)
    recent: list[Tensor] = []
    for step in range(max(plan.kept) + 1):
        end = late()
        if step in plan.kept or end:
            mean = torch.stack(recent).mean(0) if recent else torch.full((plan.seeds,), torch.nan)
            yield step, {name: weight.detach().clone() for name, weight in weights.items()}, mean
            recent = []
        if end or step == max(plan.kept):
            return
        ids = passages(size, plan, plan.seeds * plan.batch, generator).reshape(plan.seeds, plan.batch, -1).to(device)
        of_seeds = loss(weights, size, ids)
        of_seeds.sum().backward()
        recent.append(of_seeds.detach().cpu())
        clip(weights, plan.clip)
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * min(1.0, (step + 1) / plan.warmup)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def clip(weights: Mapping[str, Tensor], most: float) -> None:
    """Scale the gradient of each seed down to a norm of at most `most`."""
    gradients = [weight.grad for weight in weights.values() if weight.grad is not None]
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factor = (most / norms.clamp(min=most)).nan_to_num(nan=0.0)
    for gradient in gradients:
        gradient.mul_(factor.reshape(-1, *[1] * (gradient.ndim - 1)))


def model_of(weights: Mapping[str, Tensor], size: Size, seed: int) -> AttentionOnly:
    """The model of one seed."""
    model = AttentionOnly(size)
    model.load_state_dict({name: weight[seed].float().cpu() for name, weight in weights.items()})
    return model.eval()
