"""Many small models as one batched computation: every weight has a leading dimension of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, layer_norm

Weights = dict[str, Tensor]
BETAS, EPS = (0.9, 0.98), 1e-8  # of Adam
EAGER = 3  # calls before a CUDA graph is captured


def stacked(models: Sequence[Mapping[str, Tensor]], device: str) -> Weights:
    """State dicts of equal models as one, ready to be trained."""
    return {name: torch.stack([own[name] for own in models]).to(device).requires_grad_() for name in models[0]}


def side_by_side(
    model: nn.Module, loss: Callable[..., Tensor]
) -> Callable[[Mapping[str, Tensor], Tensor, Tensor], Float[Tensor, " models"]]:
    """The losses of many models: `loss(outputs, targets)` of each, by its own weights on its own inputs and targets.

    `model` gives the computation; its own weights are not used.
    """

    def one(own: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return loss(functional_call(model, own, (inputs,)), targets)

    mapped = vmap(one)

    def losses(weights: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention on a CPU has no rule for many models
            return mapped(dict(weights), inputs, targets)

    return losses


def within(weights: Mapping[str, Tensor], prefix: str) -> Weights:
    """The weights whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def embed(weight: Float[Tensor, "models vocabulary d"], ids: Integer[Tensor, "models batch n"]) -> Tensor:
    """Every model's embeddings of its own tokens, (models, batch, n, d)."""
    offset = weight.shape[1] * torch.arange(len(weight), device=ids.device)[:, None, None]
    return embedding(ids.int() + offset.int(), weight.flatten(0, 1))


def linear(own: Mapping[str, Tensor], name: str, x: Float[Tensor, "models rows d"]) -> Tensor:
    """`nn.Linear` of every model."""
    return torch.baddbmm(own[f"{name}.bias"].unsqueeze(1), x, own[f"{name}.weight"].mT)


def norm(own: Mapping[str, Tensor], name: str, x: Float[Tensor, "models rows d"]) -> Tensor:
    """`nn.LayerNorm` of every model."""
    weight, bias = (own[f"{name}.{part}"].unsqueeze(1) for part in ("weight", "bias"))
    return layer_norm(x, x.shape[-1:]) * weight + bias


def split_heads(x: Tensor, shape: Sequence[int], heads: int) -> Float[Tensor, "rows heads n p"]:
    """(models, batch · n, d) as (models · batch, heads, n, d / heads); `shape` is batch and n."""
    return x.unflatten(1, tuple(shape)).flatten(0, 1).unflatten(-1, (heads, -1)).transpose(1, 2)


class Replayed:
    """A function that reads and writes the same tensors at every call: on a GPU one CUDA graph, after a few calls."""

    def __init__(self, function: Callable[[], None], device: str) -> None:
        self.function, self.cuda = function, device.startswith("cuda")
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Call the function, or replay it."""
        if self.graph is not None:
            self.graph.replay()
        elif not self.cuda:
            self.function()
        elif self.calls < EAGER:  # a capture needs calls on another stream before it
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.function()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.function()
            self.graph.replay()  # a capture runs nothing
        self.calls += 1


class Adam:
    """AdamW with a learning rate per model, and gradients clipped per model.

    `decays` are the names of weights that decay, by rate · `decay` at each step. Weights become views of one tensor,
    (models, parameters), which takes a dozen kernels per step instead of hundreds. The count of steps is a tensor, for
    CUDA graphs.
    """

    def __init__(
        self, weights: Weights, decays: Sequence[str] = (), decay: float = 0.0, clip: float | None = None
    ) -> None:
        self.weights, self.clip = list(weights.values()), clip
        self.joined = _joined([weight.detach() for weight in self.weights])
        sizes = [weight[0].numel() for weight in self.weights]
        for weight, part in zip(self.weights, self.joined.split(sizes, 1), strict=True):
            weight.data = part.view(weight.shape)
        amounts = [torch.full((size,), decay * (name in decays)) for name, size in zip(weights, sizes, strict=True)]
        self.decay = torch.cat(amounts).to(self.joined.device)
        self.mean, self.square = torch.zeros_like(self.joined), torch.zeros_like(self.joined)
        self.count = torch.zeros((), dtype=torch.float64, device=self.joined.device)

    @torch.no_grad()
    def step(self, rates: Float[Tensor, " models"]) -> None:
        """One update; gradients are cleared. A missing gradient counts as 0."""
        self.count.add_(1)
        gradient = _joined([torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights])
        if self.clip is not None:
            gradient.mul_((self.clip / (gradient.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0))
        self.mean.lerp_(gradient, 1 - BETAS[0])
        self.square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        roots = self.square.sqrt().div_((1 - BETAS[1] ** self.count).sqrt().float()).add_(EPS)
        now = (rates / (1 - BETAS[0] ** self.count)).to(rates.dtype)
        self.joined.mul_(1 - rates[:, None] * self.decay).sub_(self.mean / roots * now[:, None])
        for weight in self.weights:
            weight.grad = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"mean": self.mean, "square": self.square, "count": self.count}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        for name, value in self.state().items():
            value.copy_(state[name])


def _joined(weights: Sequence[Tensor]) -> Float[Tensor, "models parameters"]:
    return torch.cat([weight.flatten(1) for weight in weights], 1)
