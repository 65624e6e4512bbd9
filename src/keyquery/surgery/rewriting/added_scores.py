"""Modules with their own attention code: the score difference of a rewrite is computed separately and added.

It is passed as the mask of nn.MultiheadAttention, or added before the next softmax. Memory grows with n².
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from keyquery.surgery.rewriting.sites import Run, Site, repeated


def beside(module: nn.Module, site: Site, run: Run) -> Callable[..., Any]:
    """A forward that adds the score difference of the rewrites to the module's scores."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not site.rewrites:
            return plain(*args, **kwargs)
        if isinstance(module, nn.MultiheadAttention):
            return _masked(module, site, run, inspect.signature(plain).bind(*args, **kwargs).arguments)
        tokens = args[0] if args else next(v for v in kwargs.values() if isinstance(v, Tensor))
        difference = _difference(site, run, tokens, None)
        if difference is None:
            return plain(*args, **kwargs)
        with Added(difference) as added:
            out = plain(*args, **kwargs)
        if not added.used:
            raise RuntimeError(f"{site.name} never calls softmax: the change has no effect on this model")
        return out

    return forward


def _difference(site: Site, run: Run, x: Tensor, real: Tensor | None) -> Float[Tensor, "batch heads n m"] | None:
    """Difference of the scaled scores of tokens x (batch, n, d) due to the rewrites; None if there is none."""
    layer, past = site.read(), site.known()
    query, key = (t.flatten(1, 2) for t in layer.project(x))
    key = repeated(key, query.shape[1])
    n, old = x.shape[1], 0 if past is None else past.keys.shape[-2]
    at = run.places(n)
    at = torch.arange(old, old + n, device=x.device)[None] if at is None else at
    query, key = (site.turn.rotate(t, at.unsqueeze(1)) for t in (query, key))
    key = key if past is None else torch.cat((past.keys, key), -2)
    real = run.real(len(x), old + n, site.name) if real is None else real
    wide_query, wide_key = site.widen(query, key, at, real)
    if wide_query is query and wide_key is key and bool((site.bias_gains() == 1).all()):
        return None
    difference = layer.scale * (wide_query @ wide_key.mT - query @ key.mT)
    learned = [weight for weight in site.module.parameters() if weight.requires_grad]
    if learned and torch.is_grad_enabled():  # computed from copies of the weights: gradients would be wrong
        difference = Ungraded.apply(difference, learned[0])  # type: ignore[no-untyped-call]
    offsets = torch.arange(old + n) - torch.arange(old, old + n)[:, None]
    bias = site.found.position_bias(layer, offsets.flatten())
    if bias is None:
        return difference
    return difference + ((site.bias_gains() - 1)[:, None, None] * bias.reshape(-1, n, old + n)).to(difference)


def _masked(module: nn.MultiheadAttention, site: Site, run: Run, arguments: dict[str, Any]) -> Any:
    """nn.MultiheadAttention with the difference as its mask."""
    x = arguments["query"]
    mask = arguments.get("attn_mask")
    hidden = arguments.get("key_padding_mask")
    if arguments["key"] is not x and not torch.equal(arguments["key"], x):
        raise ValueError(f"{site.name} is called with keys other than its queries: only self-attention can be changed")
    x = x[None] if x.ndim == 2 else x if module.batch_first else x.transpose(0, 1)
    real = None if hidden is None else hidden.reshape(len(x), -1) == 0  # bool: not masked; float: 0 is added
    difference = _difference(site, run, x, real)
    if difference is None:
        return nn.MultiheadAttention.forward(module, **arguments)
    added = difference.flatten(0, 1)
    if mask is not None:
        added = added.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else added + mask
    if hidden is not None and hidden.dtype == torch.bool:  # both masks must have one dtype
        hidden = torch.zeros_like(hidden, dtype=added.dtype).masked_fill(hidden, -torch.inf)
    arguments |= {"attn_mask": added, "key_padding_mask": hidden, "is_causal": False}
    return nn.MultiheadAttention.forward(module, **arguments)


class Ungraded(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, difference: Tensor, weight: Tensor) -> Tensor:
        """Returns the difference."""
        return difference.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Raises."""
        raise RuntimeError(
            "gradients to the weights of a changed module of this kind are not supported; freeze them "
            "(requires_grad_(False)), or swap the module for a kq.Attention first"
        )


class Added(TorchFunctionMode):
    """Context that adds a tensor to the scores of any softmax or fused attention."""

    SOFTMAX = (torch.softmax, nn.functional.softmax, Tensor.softmax)
    NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    def __init__(self, difference: Float[Tensor, "batch heads n m"]) -> None:
        super().__init__()
        self.difference, self.used = difference, False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.SOFTMAX:
            self.used = True
            scores = args[0]
            if scores.numel() != self.difference.numel():
                raise ValueError(f"scores of {tuple(scores.shape)} do not fit {tuple(self.difference.shape)}")
            return func(scores + self.difference.reshape(scores.shape).to(scores.dtype), *args[1:], **kwargs)
        if func is nn.functional.scaled_dot_product_attention:
            self.used = True
            arguments = {**dict(zip(self.NAMES, args, strict=False)), **kwargs}
            return func(**{**arguments, "attn_mask": self._mask(arguments), "is_causal": False})
        return func(*args, **kwargs)

    def _mask(self, arguments: dict[str, Any]) -> Tensor:
        mask, added = arguments.get("attn_mask"), self.difference.to(arguments["query"].dtype)
        if arguments.get("is_causal"):
            mask = torch.ones(added.shape[-2:], dtype=torch.bool, device=added.device).tril()
        if mask is None:
            return added
        return added.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else added + mask
