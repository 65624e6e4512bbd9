"""Attention maps from a tensor, a layer, or a model with a text; validated, and merged into words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from keyquery.listening import attention_maps
from keyquery.listening.hooks import config_of, has_two_sides
from keyquery.listening.inputs.data import as_arguments
from keyquery.listening.inputs.load import load_model
from keyquery.listening.inputs.word_pieces import Words, words_of
from keyquery.listening.maps import check_length, check_rows
from keyquery.support.checks import check_count, check_float, checked_integers

WIDTHS = ("hidden_size", "width", "n_embd", "d_model", "dim")  # names of the hidden size in configs


@dataclass(frozen=True)
class Mapped:
    """Attention of some heads of one layer, float64, with facts of its tokens and model."""

    maps: Float[ndarray, "heads n n"]
    heads: list[int]
    layer: int | None
    tokens: list[str]
    real: list[bool]  # not a special token
    merged: bool
    width: int | None
    model: dict[str, Any]
    causal: bool  # no head of the layer attends to a later token


def mapped(
    attention: Any,
    text: str | Words | None = None,
    inputs: Any = None,
    layer: int | None = None,
    head: int | Iterable[int] | None = None,
    tokens: Sequence[str] | None = None,
    merge: bool = True,
    tokenizer: Any = None,
    name: str | None = None,
) -> Mapped:
    """Attention maps for `kq.causes`."""
    words = number = width = None
    if isinstance(attention, (nn.Module, str, Path)):
        model, words, batch = _prepared(attention, text, inputs, tokenizer, merge)
        layers = attention_maps(model, batch)
        check_count("layer", layer, least=-len(layers), most=len(layers) - 1, optional=True)
        number = len(layers) - 1 if layer is None else layer % len(layers)
        maps = _squares(layers[number])
        if words is not None:
            maps = words.merged(torch.as_tensor(maps)).numpy()
        label = name or (type(model).__name__ if isinstance(attention, nn.Module) else Path(attention).name)
        facts = {"name": label, "layers": len(layers), "heads": len(maps)}
        sizes = (getattr(config_of(model) or model, size, None) for size in WIDTHS)
        width = next((size for size in sizes if isinstance(size, int)), None)
    elif text is not None or inputs is not None or layer is not None:
        raise ValueError("text, inputs and layer need a model; for a tensor, pass tokens and head")
    else:
        maps, facts = _squares(attention), {"name": name or "attention"}
    heads, count = list(range(len(maps))) if head is None else chosen("head", head, len(maps)), maps.shape[-1]
    texts = [str(position) for position in range(count)] if words is None else words.texts
    if tokens is not None:
        if isinstance(tokens, str) or not isinstance(tokens, Iterable) or len(tokens) != count:
            raise ValueError(f"tokens must be a list of {count} strings, one per row of the attention")
        texts = list(map(str, tokens))
    real, merged = ([True] * count, False) if words is None else (words.real, len(words.texts) < len(words.ids))
    return Mapped(maps[heads], heads, number, texts, real, merged, width, facts, not np.triu(maps, 1).any())


def _prepared(
    source: Any, text: str | Words | None, inputs: Any, tokenizer: Any, merge: bool
) -> tuple[nn.Module, Words | None, Mapping[str, Tensor]]:
    """A live model, the words of the text if any, and the input batch."""
    if (text is None) == (inputs is None):
        raise ValueError("a model needs either text or inputs")
    model, stored = (source, None) if isinstance(source, nn.Module) else load_model(source)
    if text is None:
        if not isinstance(inputs, Mapping):
            raise TypeError(f"inputs must be a mapping of argument names to tensors, got {type(inputs).__name__}")
        return model, None, inputs
    argument = getattr(model, "main_input_name", "input_ids")
    if argument != "input_ids":
        raise ValueError(f"{type(model).__name__} takes {argument}, not text: pass `inputs` from Python")
    tokenizer = stored if tokenizer is None else tokenizer
    if not isinstance(text, Words) and tokenizer is None:
        raise ValueError("text needs a tokenizer: none was passed, and none was found with the model")
    words = text if isinstance(text, Words) else words_of(text, tokenizer, merge)
    check_length(model, len(words.ids))
    batch = next(as_arguments(model, words.batch()))
    if has_two_sides(model):
        batch = {**batch, "decoder_input_ids": batch["input_ids"]}
    return model, words, batch


def _squares(attention: Any) -> Float[ndarray, "heads n n"]:
    """Attention of one text as (heads, n, n) in float64, validated."""
    maps = torch.as_tensor(attention) if isinstance(attention, (np.ndarray, list, tuple)) else attention
    check_float("attention", maps, "... n n")
    shape = tuple(maps.shape)
    if len(shape) == 4 and shape[0] == 1:
        maps = maps[0]
    if maps.ndim not in (2, 3) or shape[-1] != shape[-2]:
        raise ValueError(f"attention must be (n, n) or (heads, n, n) of one text, got {shape}")
    maps = maps.detach().reshape(-1, *shape[-2:])
    check_rows(maps)
    return maps.cpu().double().numpy()


def chosen(name: str, values: Any, count: int) -> list[int]:
    """Different numbers below `count`, from a list, a tensor, an array or a single number."""
    items = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else values
    numbers = checked_integers(name, [items] if np.ndim(items) == 0 else items)
    for number in numbers:
        check_count(name, number, least=0, most=count - 1)
    if not numbers:
        raise ValueError(f"{name} must name at least one, got none")
    return list(dict.fromkeys(numbers))
