"""Adapters that call kq.Attention with the interface of a model's own attention, and their undoable insertion."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from keyquery.checkpoints import Layer
from keyquery.intervene.handle import rate_of
from keyquery.layers import Attention, Cache
from keyquery.listening.exclusive import hold
from keyquery.listening.hooks import put

# The module of transformers' output-recording hooks, and the flag that they are installed.
RECORDERS, RECORDED = "transformers.utils.output_capturing", "_output_capturing_hooks_installed"


class Swapped(nn.Module):
    """A kq.Attention with the interface and attributes of the module it replaces."""

    def __init__(self, attention: Attention, old: nn.Module, layer: Layer) -> None:
        super().__init__()
        common = vars(nn.Module())
        vars(self).update({name: value for name, value in vars(old).items() if name not in common})
        self.attention = attention
        norm = layer.modules.get("norm", layer.modules.get("first_norm"))
        self.fed_by = None if norm is None or layer.norm is None else (norm, layer.norm.kind, layer.norm.eps)
        self.train(old.training)


class TransformersAttention(Swapped):
    """For the attention modules of transformers: tokens (batch, n, d) in, (output, None) out."""

    def __init__(self, attention: Attention, old: nn.Module, layer: Layer) -> None:
        super().__init__(attention, old, layer)
        self.is_causal = bool(getattr(old, "is_causal", False)) or layer.causal
        self.after: Any = nn.Dropout(rate_of(old, ("resid_dropout",))).train(old.training)  # GPT-2's

    def forward(
        self,
        hidden_states: Float[Tensor, "batch n d"],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
        is_causal: bool | None = None,
        layer_past: Any = None,
        **_: Any,
    ) -> tuple[Float[Tensor, "batch n d"], None]:
        """As transformers' sdpa attention: causal if there is no mask and more than one token."""
        batch, n = hidden_states.shape[:2]
        visible = None if attention_mask is None else _visible(attention_mask, batch, n)
        causal = n > 1 and visible is None and (self.is_causal if is_causal is None else is_causal)
        past = past_key_values if past_key_values is not None else layer_past
        cache = None if past is None else Borrowed(past, self.layer_idx, visible, n if causal else None)
        if position_ids is not None and self.attention.rope is not None:
            position_ids = position_ids[0] if len(position_ids) == 1 else position_ids
        else:
            position_ids = None
        out = self.attention(hidden_states, visible, causal, position_ids, cache)
        return self.after(out), None


class TorchAttention(Swapped):
    """For nn.MultiheadAttention: self-attention only, and no attention weights."""

    # Read by nn.TransformerEncoderLayer: None disables its fused path, which would bypass the module.
    in_proj_weight = in_proj_bias = None

    def forward(
        self,
        query: Float[Tensor, "... d"],
        key: Float[Tensor, "... d"],
        value: Float[Tensor, "... d"],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Float[Tensor, "... d"], None]:
        """As nn.MultiheadAttention, whose masks are True, or −∞, where attention is not allowed; weights are None."""
        if key is not query or value is not query:
            raise ValueError(
                "swapped nn.MultiheadAttention is self-attention: query, key and value must be the same tensor"
            )
        apart = query.ndim == 3 and not self.batch_first
        x = query.transpose(0, 1) if apart else query if query.ndim == 3 else query.unsqueeze(0)
        out = self.attention(x, self._mask(x, key_padding_mask, attn_mask), is_causal and attn_mask is None)
        return (out.transpose(0, 1) if apart else out if query.ndim == 3 else out.squeeze(0)), None

    def _mask(self, x: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """True where attention is allowed, (batch, n, n) or (batch, heads, n, n); padding queries are unaffected."""
        batch, n = x.shape[:2]
        real = None if padding is None else ~_hidden(padding).reshape(batch, 1, n).expand(batch, n, n)
        if mask is None:
            return real
        visible = ~_hidden(mask)
        visible = visible.expand(batch, n, n) if visible.numel() == n * n else visible.reshape(batch, -1, n, n)
        return visible if real is None else visible & (real if visible.ndim == 3 else real[:, None])


class Borrowed(Cache):
    """A transformers cache with the interface of kq.Cache."""

    def __init__(self, past: Any, layer: Any, visible: Tensor | None, first: int | None) -> None:
        super().__init__()
        self.past = getattr(past, "self_attention_cache", past)
        self._layer = layer
        self._first = first
        # A static cache is preallocated; its length follows from the mask.
        known = None if visible is None else visible.shape[-1] - visible.shape[-2]
        self._old = int(self.past.get_seq_length(layer)) if known is None else known

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self._old

    def append(
        self, layer: nn.Module, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append tokens; from an empty static cache, only these are returned."""
        key, value = self.past.update(key, value, self._layer)
        return key[:, :, : self._first], value[:, :, : self._first], mask


def replace(model: nn.Module, name: str, new: Swapped, changes: ExitStack) -> None:
    """Replace the module `name` by `new`."""
    owner, _, attribute = name.rpartition(".")
    changes.callback(_follow, model.get_submodule(name), new)
    put(model.get_submodule(owner), attribute, new, changes)


def unnest(model: nn.Module, names: list[str], changes: ExitStack) -> None:
    """Keep nn.TransformerEncoder from passing nested tensors to swapped layers."""
    for prefix, encoder in model.named_modules():
        inside = any(name.startswith(f"{prefix}." if prefix else "") for name in names)
        if isinstance(encoder, nn.TransformerEncoder) and inside:
            hold(("nested", id(encoder)), partial(_unnest, encoder), changes)  # shared with swaps of other layers


def unrecord(model: nn.Module, changes: ExitStack) -> None:
    """Remove recording hooks installed during the swap at its undo: they would miss the restored modules."""
    before = {module for module in model.modules() if vars(module).get(RECORDED)}
    changes.callback(_unrecord, model, before)


def _unrecord(model: nn.Module, before: set[nn.Module]) -> None:
    for module in [module for module in model.modules() if vars(module).get(RECORDED) and module not in before]:
        for part in module.modules():
            vars(part).pop(RECORDED, None)
            for key, hook in list(part._forward_hooks.items()):
                if getattr(hook, "__module__", None) == RECORDERS:
                    del part._forward_hooks[key]


def _unnest(encoder: nn.TransformerEncoder) -> Callable[[], None]:
    back = partial(vars(encoder).__setitem__, "use_nested_tensor", encoder.use_nested_tensor)
    encoder.use_nested_tensor = False
    return back


def _follow(old: nn.Module, new: nn.Module) -> None:
    """Carry a change of training mode over to the restored module."""
    if old.training != new.training:
        old.train(new.training)


def _visible(mask: Tensor, batch: int, n: int) -> Bool[Tensor, "batch ..."]:
    """Visible pairs, (batch, n, m) or (batch, heads, n, m), of a transformers mask."""
    if mask.ndim != 4 or mask.shape[-2] != n:
        raise ValueError(f"attention_mask must be (batch, heads or 1, {n}, keys), got {tuple(mask.shape)}")
    visible = mask if mask.dtype == torch.bool else ~_hidden(mask)
    visible = visible.expand(batch, -1, -1, -1)
    return visible.squeeze(1) if visible.shape[1] == 1 else visible


def _hidden(mask: Tensor) -> Bool[Tensor, "..."]:
    """Masked positions: True, or (nearly) −∞."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if not bool((hidden | (mask == 0)).all()):
        raise ValueError("masks of swapped attention must add 0 or −∞ to the scores")
    return hidden
