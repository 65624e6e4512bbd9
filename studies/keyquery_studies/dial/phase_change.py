"""Two-layer attention-only models, trained side by side through the phase change in which induction heads form.

All seeds are trained in one batched computation: every weight has a leading dimension of seeds. `AttentionOnly` is the
same model for one seed, as the instruments read it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, layer_norm, scaled_dot_product_attention

from keyquery.forms import Rope
from keyquery.layers import Attention

Weights = dict[str, Tensor]
PROJECTIONS = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Size:
    """Of the models."""

    vocabulary: int = 4096
    width: int = 256
    depth: int = 2
    heads: int = 8

    @property
    def rope(self) -> Rope:
        """Of each head."""
        return Rope(self.width // self.heads)


@dataclass(frozen=True)
class Plan:
    """Of the training."""

    seeds: int = 8
    batch: int = 64
    length: int = 128
    rate: float = 1e-3
    warmup: int = 100
    decay: float = 0.01
    clip: float = 1.0
    # Steps at which the models are kept.
    kept: Sequence[int] = (0, 100, 200, 300, 400, 500, 600, 800, 1000, 1250, 1500, 2000, 2500, 3000, 4000, 6000, 8000)


class AttentionOnly(nn.Module):
    """Embeddings, residual attention layers without MLPs, and an output projection; norms have no parameters.

    >>> AttentionOnly(Size(50, 16, 2, 2))(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 50])
    """

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
    """Weights of all seeds, named as in `AttentionOnly`: normal, of standard deviation 1/√width, embeddings 0.02."""
    shapes = {name: tuple(weight.shape) for name, weight in AttentionOnly(size).state_dict().items()}
    stacks: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            std = 0.02 if name == "tokens.weight" else size.width**-0.5
            stacks[name].append(std * torch.randn(shape, generator=generator))
    return {name: torch.stack(each) for name, each in stacks.items()}


def logits(weights: Mapping[str, Tensor], size: Size, ids: Int[Tensor, "seeds batch n"]) -> Tensor:
    """Logits (seeds, batch · n, vocabulary) of all models, each on its own sequences."""
    seeds, batch, n = ids.shape
    offset = size.vocabulary * torch.arange(seeds, device=ids.device)[:, None, None]
    x = embedding(ids + offset, weights["tokens.weight"].flatten(0, 1)).flatten(1, 2)
    places = torch.arange(n, device=ids.device)
    for layer in range(size.depth):
        query, key, value, output = (weights[f"layers.{layer}.{name}.weight"] for name in PROJECTIONS)
        normed = layer_norm(x, (size.width,))
        q, k, v = (
            (normed @ weight.mT).reshape(seeds * batch, n, size.heads, -1).transpose(1, 2)
            for weight in (query, key, value)
        )
        q, k = size.rope.rotate(q, places), size.rope.rotate(k, places)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + mixed.reshape(seeds, batch * n, -1) @ output.mT
    return layer_norm(x, (size.width,)) @ weights["unembed.weight"].mT


def loss(weights: Mapping[str, Tensor], size: Size, ids: Int[Tensor, "seeds batch n"]) -> Float[Tensor, " seeds"]:
    """Next-token cross-entropy of every model, in nats."""
    targets = ids.roll(-1, 2)
    targets[..., -1] = -100
    predicted = logits(weights, size, ids)
    each = cross_entropy(predicted.flatten(0, 1).float(), targets.flatten(), reduction="none", ignore_index=-100)
    return each.reshape(len(ids), -1).sum(1) / (ids.shape[1] * (ids.shape[2] - 1))


def train(
    tokens: Int[Tensor, " many"], size: Size, plan: Plan, device: str, late: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, Weights, float]]:
    """Step, weights and seconds so far at the steps to be kept; a run that is `late` ends early, with its last step."""
    weights = {name: weight.to(device).requires_grad_() for name, weight in initial(size, plan.seeds).items()}
    optimizer = torch.optim.AdamW(list(weights.values()), plan.rate, (0.9, 0.98), weight_decay=plan.decay)
    tokens, start = tokens.to(device), time.monotonic()
    generator = torch.Generator().manual_seed(0)
    within = torch.arange(plan.length, device=device)
    for step in range(max(plan.kept) + 1):
        end = late()
        if step in plan.kept or end:
            yield step, {name: weight.detach() for name, weight in weights.items()}, time.monotonic() - start
        if end or step == max(plan.kept):
            return
        starts = torch.randint(len(tokens) - plan.length, (plan.seeds, plan.batch), generator=generator)
        ids = tokens[starts.to(device)[..., None] + within].long()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            of_seeds = loss(weights, size, ids)
        of_seeds.sum().backward()
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


def blind_guess(tokens: Int[Tensor, " many"]) -> float:
    """The loss of guessing each token of a set alike, in nats."""
    return math.log(len(tokens.unique()))
