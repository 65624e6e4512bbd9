"""Attention of any other module: torch functions are watched while the model runs.

Seen are `scaled_dot_product_attention`, `nn.MultiheadAttention`, and a softmax over a product of two activations, whose
weights are then multiplied with values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from keyquery.listening.call import Call, four_dims
from keyquery.listening.hooks import around_calls
from keyquery.listening.listen import Attachment, Facts
from keyquery.listening.products import (
    Contraction,
    Products,
    Softmax,
    bound,
    contraction,
    equation_of,
    tensors,
    unscaled,
)
from keyquery.listening.tokens import in_backward, nested, signature_of

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
Lead = Callable[[torch.Size], tuple[int, int]]  # batch and heads of leading sizes


def looks_like_attention(module: nn.Module) -> bool:
    """Whether a module is called attention."""
    called = type(module).__name__.lower()
    return "attention" in called or "attn" in called


def attach(attachment: Attachment, modules: dict[str, nn.Module], seen: Collection[str], changes: ExitStack) -> None:
    """Watch the torch functions of a model, unless all of its attention is among what is `seen` without."""
    unseen = (
        name
        for name, module in modules.items()
        if looks_like_attention(module) and next(module.parameters(), None) is not None
        if not any(nested(name, other) for other in seen)
    )
    if seen and next(unseen, None) is None:
        return
    mode = Functions(attachment, modules)
    mode.follow([(name, module) for name, module in modules.items() if not _is_leaf(module)], changes)
    for module in modules.values():
        if module is attachment.model or hasattr(type(module), "main_input_name"):
            around_calls(module, mode.around, changes)


def _is_leaf(module: nn.Module) -> bool:
    """Whether a module is one of torch's own that holds no other."""
    return type(module).__module__.startswith("torch.nn.modules") and next(module.children(), None) is None


class Functions(Products):
    """The function mode of one model."""

    def __init__(self, attachment: Attachment, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.attachment, self.modules = attachment, modules
        self.pending: list[Softmax] = []  # whose product with values was not seen yet
        self.on = False

    def around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model, or one inside of it, with the mode on."""
        if self.on:
            return call(*args, **kwargs)
        self.on = True
        self.stack.clear()
        self.pending.clear()
        try:
            with self:
                return call(*args, **kwargs)
        finally:
            self.on = False

    def idle(self) -> bool:
        """Inside of attention that another adapter, or this one, has seen."""
        return self.attachment.inside > 0

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        if name and not self.on and not self.attachment.run.frames and self.attachment.changes_calls:
            if in_backward():
                self.attachment.check_again(name)
            elif looks_like_attention(module):
                raise RuntimeError(f"{name} was called outside of the model's forward: call the model itself")
        super().enter(name, module, args, kwargs)
        self.attachment.run.note(module, args, kwargs)
        if looks_like_attention(module):
            self.attachment.ran.add(name)

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """A module returns: softmaxes of which no product with values was seen are shown without them."""
        super().leave(name, module, args, kwargs, out)
        for event in [event for event in self.pending if event.owner == name]:
            self.pending.remove(event)
            if event.used and not event.seen and self._show(name, partial(self._facts, event, None))[1]:
                raise RuntimeError(f"{name or 'the model'} changes its attention after the softmax: not supported")
        if not self.attachment.run.frames:
            self.attachment.run.arguments.pop(module, None)

    def softmax(self, event: Softmax) -> None:
        """Wait for the product with values."""
        self.pending.append(event)

    def fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Torch's own attention; nn.MultiheadAttention projects, attends and projects in one function."""
        given = arguments_of(func, args, kwargs)
        call, new = self._show(self.owner(), partial(fused_facts, given, self._lead))
        if not new:
            return self._inside(func, *args, **kwargs)
        if "num_heads" in given:
            return self._inside(_packed_output, call, new, given)
        out = self._inside(call.attend, new, given.get("dropout_p", 0.0))
        return out.reshape(*given["query"].shape[:-1], out.shape[-1])

    def valued(self, event: Softmax, func: Any, args: Any, kwargs: Any) -> Any:
        """Show the call whose weights meet their values here, and go on with what it was replaced by."""
        weights, value = list(tensors(args))[-2:]
        equation = equation_of(args)
        order = None if equation is None else contraction(equation)
        known = (equation is None or order is not None) and getattr(func, "__name__", "") in (
            *("matmul", "__matmul__", "bmm", "einsum"),
        )
        if not known or not self._inside(_is_whole, event, weights, order):
            event.seen = False
            return self._inside(func, *args, **kwargs)
        self.pending = [other for other in self.pending if other is not event]
        standard = value if order is None else torch.einsum(order.right, value).mT
        call, new = self._show(event.owner, partial(self._facts, event, standard))
        if not new:
            return self._inside(func, *args, **kwargs)
        out = self._inside(call.attend, new, event.dropout)
        if order is None:
            return out.reshape(*weights.shape[:-1], out.shape[-1])
        rows = torch.einsum(order.left, weights).shape[:-1]
        return torch.einsum(order.out, out.reshape(*rows, out.shape[-1]))

    def _facts(self, event: Softmax, value: Tensor | None) -> Facts:
        lead = self._lead(event.scores.shape[:-2])
        scores = event.scores.reshape(*lead, *event.scores.shape[-2:])
        n, m = scores.shape[-2:]
        values = None if value is None else _split(value, lead)
        for sides, factor in event.products:
            query, key = (None, None) if sides is None else (_split(side, lead) for side in sides)
            query, key = (key, query) if event.swapped else (query, key)
            if query is not None and key is not None and (query.shape[-2], key.shape[-2]) == (n, m):
                return Facts(query, key, values, factor, given_scores=scores)
        query, key = scores.new_zeros(*lead, n, 0), scores.new_zeros(*lead, m, 0)  # not known
        return Facts(query, key, values, None, given_scores=scores)

    def _lead(self, shape: torch.Size) -> tuple[int, int]:
        """Leading dimensions as batch and heads; where they are one, by the batch of the module's input."""
        if len(shape) >= 2:
            return shape[:-1].numel(), shape[-1]
        count = shape[0] if shape else 1
        given = self.attachment.run.arguments.get(self.modules[self.owner()])
        batch = len(given.first) if given is not None and given.first is not None and given.first.ndim == 3 else 1
        return (batch, count // batch) if count % batch == 0 else (1, count)

    def _show(self, name: str, facts: Callable[[], Facts]) -> tuple[Call, dict[str, Tensor]]:
        try:
            return self._inside(self.attachment.show, self.modules[name], name, facts)
        except TypeError as error:  # torch turns those that are raised in an operator into one about its operands
            raise RuntimeError(str(error)) from error

    def _inside(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function whose torch functions are not followed."""
        self.attachment.inside += 1
        try:
            return function(*args, **kwargs)
        finally:
            self.attachment.inside -= 1


def _is_whole(event: Softmax, weights: Tensor, order: Contraction | None) -> bool:
    """Whether weights that meet values are all of a softmax, in the order of its scores; hidden rows may be 0."""
    weights = weights if order is None else torch.einsum(order.left, weights)
    if weights.numel() != event.scores.numel() or weights.shape[-2:] != event.scores.shape[-2:]:
        return False
    if not event.changed or event.dropout:
        return True
    expected = event.scores.softmax(-1).reshape(weights.shape).to(weights.dtype)
    return torch.allclose(weights.nan_to_num(0.0), expected.nan_to_num(0.0), rtol=1e-3, atol=1e-6)


def _split(x: Tensor, lead: tuple[int, int]) -> Tensor | None:
    """A tensor (…, n, r) with its leading dimensions as batch and heads; shared heads are expanded."""
    if x.ndim >= 4:
        return x.reshape(-1, *x.shape[-3:]).expand(lead[0], -1, -1, -1)
    if x.ndim == 3 and len(x) == lead[0] * lead[1]:
        return x.reshape(*lead, *x.shape[-2:])
    return x.unsqueeze(1).expand(-1, lead[1], -1, -1) if x.ndim == 3 and len(x) == lead[0] else None


def arguments_of(func: Any, args: Any, kwargs: Any) -> Mapping[str, Any]:
    """The arguments of one of torch's attention functions by name."""
    if func.__name__ == "multi_head_attention_forward":
        return signature_of(func).bind(*args, **kwargs).arguments
    return bound(NAMES, args, kwargs)


def fused_facts(given: Mapping[str, Any], lead: Lead) -> Facts:
    """The call inside one of torch's attention functions, from its arguments."""
    if "num_heads" in given:
        return _packed_facts(given)
    (query, of_query), (key, of_key) = unscaled(given["query"]), unscaled(given["key"])
    mask, scale, sizes = given.get("attn_mask"), given.get("scale"), query.shape[:-2]
    if mask is not None and hasattr(mask, "_materialize"):
        mask = mask._materialize(query.device)  # torch's lazy causal masks
    if mask is not None and (mask.ndim <= 2 or len(sizes) == 2):
        mask = four_dims(mask)
    elif mask is not None:
        mask = mask.expand(*sizes, *mask.shape[-2:]).reshape(*lead(sizes), *mask.shape[-2:])
    query, key, value = (x.reshape(*lead(x.shape[:-2]), *x.shape[-2:]) for x in (query, key, given["value"]))
    scale = (query.shape[-1] ** -0.5 if scale is None else float(scale)) * of_query * of_key
    return Facts(query, key, value, scale, attn_mask=mask, causal=0 if given.get("is_causal") else None)


def _packed_facts(given: Mapping[str, Any]) -> Facts:
    """The call inside torch's multi_head_attention_forward, from its arguments; sequences come first in them."""
    inputs, heads = [given[name] for name in ("query", "key", "value")], int(given["num_heads"])
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{role}_proj_weight"] for role in "qkv"]
    else:
        weights = list(given["in_proj_weight"].chunk(3))
    bias = given.get("in_proj_bias")
    biases = [None] * 3 if bias is None else list(bias.chunk(3))
    projected = [linear(x, weight, shift) for x, weight, shift in zip(inputs, weights, biases, strict=True)]
    projected = [x.unsqueeze(1) if x.ndim == 2 else x for x in projected]
    mask, hidden = given.get("attn_mask"), given.get("key_padding_mask")
    for index, role in ((1, "bias_k"), (2, "bias_v")):
        if given.get(role) is not None:
            projected[index] = torch.cat((projected[index], given[role].expand(1, projected[index].shape[1], -1)))
    query, key, value = (x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for x in projected)
    if given.get("add_zero_attn"):
        key, value = (pad(x, (0, 0, 0, 1)) for x in (key, value))
    batch, m = len(query), key.shape[-2]
    shown = None
    if mask is not None:
        shown = ~mask if mask.dtype == torch.bool else mask
        shown = shown.unflatten(0, (batch, heads)) if shown.ndim == 3 else shown[None, None]
        shown = pad(shown, (0, m - shown.shape[-1]), value=1.0 if shown.dtype == torch.bool else 0.0)
    real = None if hidden is None else pad(hidden.reshape(batch, -1) == 0, (0, m - hidden.shape[-1]), value=True)
    if real is not None:
        seen = real[:, None, None]
        shown = seen if shown is None else seen & shown if shown.dtype == torch.bool else shown.where(seen, -torch.inf)
    same = inputs[0] is inputs[1] or torch.equal(*inputs[:2])
    return Facts(query, key, value, query.shape[-1] ** -0.5, shown, real=real, cross=not same)


def _packed_output(call: Call, new: dict[str, Tensor], given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    dropout = float(given.get("dropout_p", 0.0)) if given.get("training", True) else 0.0
    out = call.attend(new, dropout).permute(2, 0, 1, 3).flatten(2)
    out = linear(out, given["out_proj_weight"], given["out_proj_bias"])
    out = out.squeeze(1) if given["query"].ndim == 2 else out
    if not given.get("need_weights", True):
        return out, None
    weights = call.replaced(new).weights()
    return out, weights.mean(1) if given.get("average_attn_weights", True) else weights
