"""Heads out of trained models: each layer's query and key weights as one Form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from keyquery.forms import Form


@dataclass(frozen=True)
class Layer:
    """The heads of one attention layer: a Form with a batch of heads, and where it was found."""

    index: int
    name: str
    form: Form
    scale: float


def read(model: nn.Module) -> Iterator[Layer]:
    """The attention layers of a live model, in order, one at a time: every `nn.MultiheadAttention` in it.

    Weights are read as they are (view "raw": no bias, no norm gain), and not copied.

    >>> block = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2)
    >>> [layer.name for layer in kq.read(block)]
    ['self_attn']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    if not found:
        kinds = sorted({type(m).__name__ for m in model.modules()})
        raise ValueError(f"model has no nn.MultiheadAttention; it is made of {', '.join(kinds)}")
    return (_layer(index, name, attention) for index, (name, attention) in enumerate(found))


def _layer(index: int, name: str, attention: nn.MultiheadAttention) -> Layer:
    if attention.in_proj_weight is None:
        raise ValueError(f"{name}: keys of width {attention.kdim} beside queries of width {attention.embed_dim}")
    query, key, _ = attention.in_proj_weight.detach().chunk(3)
    heads = (attention.num_heads, attention.head_dim)
    form = Form(query.unflatten(0, heads), key.unflatten(0, heads))
    return Layer(index, name, form, scale=attention.head_dim**-0.5)
