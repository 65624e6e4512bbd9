"""Many small language models trained side by side as one: every weight has a leading dimension, the run.

Products are batched over runs, and heads of all runs are heads of one attention call, so that one monitor sees all.
Losses, gradient clipping and AdamW act on each run alone: one that diverges does not disturb the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, layer_norm, rms_norm, scaled_dot_product_attention

from keyquery.forms import Rope
from keyquery.instruments.monitor.bound import largest_eigenvalue
from keyquery.instruments.monitor.statistics import LARGEST, call_statistics
from keyquery.layers import LanguageModel
from keyquery.layers.kernels import make
from keyquery.listening.call import Call, Tokens

EPS = 1e-5


class StackedAttention(nn.Module):
    """`kq.Attention` of several runs: head h of run i is head i·heads + h."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        first = layers[0]
        self.runs, self.heads, self.dims, self.rope = len(layers), first.heads, first.head_dim, first.rope
        self.weights = _stacked(layers)
        self.shape = make(first.kernel, self.runs * self.heads, self.dims, 0.5, self.rope)
        if self.shape is not None:
            for name, own in self.shape.named_parameters():
                own.data = torch.cat([dict(layer.shape.named_parameters())[name].data for layer in layers])
        self.recorded, self.clipped = False, False  # whether inputs and logits of the forward are measured
        self.norm: Tensor | None = None  # largest ‖x‖ of every run
        self.largest: Tensor | None = None  # largest logit of every head, (runs, heads)

    def forward(self, x: Tensor) -> Tensor:
        """(runs, batch, n, dim) to the same."""
        runs, batch, n, dim = x.shape
        flat = x.reshape(runs, batch * n, dim)
        if self.recorded:
            self.norm = torch.linalg.vector_norm(flat.detach().float(), dim=-1).amax(-1)
        key, value = (self._heads(self._linear(flat, role), batch, n) for role in ("key", "value"))
        query = self._heads(self._linear(flat, "query"), batch, n) if self.shape is None else self.shape(key)
        if "query_norm_weight" in self.weights:
            query, key = self._normed(query, "query_norm_weight"), self._normed(key, "key_norm_weight")
        rope, places = self.rope, torch.arange(n, device=x.device)
        assert isinstance(rope, Rope)
        query, key = (rope.rotate(t, places).to(value.dtype) for t in (query, key))
        if self.clipped:
            tokens = Tokens(places[None], places[None])
            call = Call(self, "", 0, query, key, None, self.dims**-0.5, tokens, causal=0)
            self.largest = call_statistics(call)[LARGEST].view(runs, self.heads)
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.dims**-0.5)
        out = out.unflatten(1, (runs, self.heads)).permute(1, 0, 3, 2, 4).reshape(runs, batch * n, -1)
        return self._linear(out, "output").reshape(runs, batch, n, dim)

    def _linear(self, x: Tensor, role: str) -> Tensor:
        return linear(x, self.weights[f"{role}_weight"], self.weights[f"{role}_bias"])

    def _heads(self, x: Tensor, batch: int, n: int) -> Tensor:
        return x.reshape(self.runs, batch, n, self.heads, self.dims).permute(1, 0, 3, 2, 4).flatten(1, 2)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        gain = self.weights[name].repeat_interleave(self.heads, 0)[:, None]
        return rms_norm(x.float(), (self.dims,), eps=1e-6) * gain

    @torch.no_grad()
    def bound(self) -> Tensor:
        """Largest bound of a head's logits, per run (see `logit_bound`), at the inputs of the last recorded forward."""
        if "query_norm_weight" in self.weights:
            sizes = [self.weights[f"{side}_norm_weight"].abs().amax(-1) * self.dims**0.5 for side in ("query", "key")]
            return self.dims**-0.5 * sizes[0] * sizes[1]
        assert self.norm is not None
        key, query = self._projection("key"), None
        if self.shape is None:
            query = self._projection("query")
        else:  # C z is linear in z: applied to the columns of W and to b it gives those of the queries
            query = tuple(self.shape(part.mT.flatten(0, 1)).unflatten(0, (self.runs, -1)).mT for part in key)
        sides = []
        for weight, bias in (query, key):
            length = largest_eigenvalue(weight @ weight.mT).clamp(min=0).sqrt() * self.norm.double()[:, None]
            sides.append(length + torch.linalg.vector_norm(bias, dim=(-2, -1)))
        return (self.dims**-0.5 * sides[0] * sides[1]).amax(-1)

    def _projection(self, side: str) -> tuple[Tensor, Tensor]:
        """Weight (runs, heads, dims, width) and bias (runs, heads, dims, 1) in float64."""
        weight, bias = (self.weights[f"{side}_{part}"].double() for part in ("weight", "bias"))
        return weight.unflatten(1, (self.heads, self.dims)), bias.unflatten(1, (self.heads, self.dims))[..., None]

    @torch.no_grad()
    def clip(self, tau: Tensor) -> Tensor:
        """QK-Clip: scale heads whose largest logit of the last forward exceeds their run's tau; how many, per run."""
        assert self.largest is not None
        above = self.largest > tau[:, None]  # not where it is NaN
        gamma = torch.where(above, tau[:, None] / torch.where(above, self.largest, 1.0), 1.0)
        rows = gamma.sqrt().repeat_interleave(self.dims, 1)
        for side in ("query", "key") if self.shape is None else ("key",):
            self.weights[f"{side}_weight"].mul_(rows[..., None])
            self.weights[f"{side}_bias"].mul_(rows)
        return above.sum(1)


class StackedModel(nn.Module):
    """Language models of one shape as one: token ids (runs, batch, n) to logits (runs, batch·n, vocabulary)."""

    def __init__(self, models: Sequence[LanguageModel]) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.stack([model.tokens.weight.data for model in models]))
        depth = len(models[0].body.blocks)
        self.attention = nn.ModuleList(
            StackedAttention([model.body.blocks[at].attention for model in models]) for at in range(depth)
        )
        parts = [[model.body.blocks[at] for model in models] for at in range(depth)]
        self.blocks = nn.ModuleList(_stacked(blocks, skip="attention.") for blocks in parts)
        self.norm = _stacked([model.body.norm for model in models])

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of every run."""
        runs, vocabulary, _ = self.tokens.shape
        places = ids + vocabulary * torch.arange(runs, device=ids.device)[:, None, None]
        x = embedding(places, self.tokens.flatten(0, 1))
        block: Any  # a dict of stacked weights
        for attention, block in zip(self.attention, self.blocks, strict=True):
            x = x + attention(_norm(x, block["attention_norm_weight"], block["attention_norm_bias"]))
            inner = _norm(x, block["mlp_norm_weight"], block["mlp_norm_bias"]).flatten(1, 2)
            inner = gelu(linear(inner, block["mlp_0_weight"], block["mlp_0_bias"]))
            x = x + linear(inner, block["mlp_2_weight"], block["mlp_2_bias"]).view_as(x)
        x = _norm(x, self.norm["weight"], self.norm["bias"]).flatten(1, 2)
        return torch.bmm(x, self.tokens.mT)

    def gradient_norms(self) -> Tensor:
        """The norm of all gradients of every run."""
        norms = [torch.linalg.vector_norm(gradient, dim=1) for gradient in self._gradients()]
        return torch.linalg.vector_norm(torch.stack(norms), dim=0)

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients of every run by a factor."""
        for gradient in self._gradients():
            gradient.mul_(factor[:, None])

    def _gradients(self) -> Iterator[Tensor]:
        runs = len(self.tokens)
        return (weight.grad.view(runs, -1) for weight in self.parameters() if weight.grad is not None)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x Wᵀ + b of every run."""
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    normed = layer_norm(x, x.shape[-1:], eps=EPS)
    return normed * weight[:, None, None] + bias[:, None, None]


def _stacked(modules: Sequence[nn.Module], skip: str = "shape.") -> nn.ParameterDict:
    """The parameters of modules alike, stacked; dots in names become underscores."""
    named = [dict(module.named_parameters()) for module in modules]
    return nn.ParameterDict(
        {
            name.replace(".", "_"): nn.Parameter(torch.stack([own[name].data for own in named]))
            for name in named[0]
            if not name.startswith((skip, "shape."))
        }
    )
