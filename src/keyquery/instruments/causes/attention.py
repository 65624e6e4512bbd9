"""Attention of any origin: a tensor, a layer, a model and a text; checked, and by words where there are any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor, nn

from keyquery.capture import attention_maps
from keyquery.capture.load import load_model
from keyquery.capture.word_pieces import Words, words_of
from keyquery.support.checks import check_count, check_float

NEAR = 1e-4  # by which rows may miss a sum of 1; in half precision as much as rounding makes of it
WIDTHS = ("hidden_size", "width", "n_embd", "d_model", "dim")  # what configurations call it


@dataclass(frozen=True)
class Mapped:
    """The attention of some heads of one layer, float64, and what is known of its tokens and its model."""

    maps: Float[ndarray, "heads n n"]
    heads: list[int]
    layer: int | None
    tokens: list[str]
    real: list[bool]  # not what a tokenizer adds
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
    """Attention as `kq.causes` takes it.

    >>> mapped(torch.eye(3)).heads
    [0]
    """
    if not isinstance(attention, (nn.Module, str, Path)):
        if text is not None or inputs is not None or layer is not None:
            raise ValueError("text, inputs and layer go with a model; attention is a tensor here, give tokens and head")
        return _told(_squares(attention), head, tokens, None, None, None, {"name": name or "attention"})
    if (text is None) == (inputs is None):
        raise ValueError("a model needs a text or inputs, and only one of them")
    model, words, batch = _prepared(attention, text, inputs, tokenizer, merge)
    layers = attention_maps(model, batch)
    at = _layer(layer, len(layers))
    maps = _squares(layers[at])
    if words is not None:
        maps = words.merged(torch.as_tensor(maps)).numpy()
    label = name or (type(model).__name__ if isinstance(attention, nn.Module) else Path(attention).name)
    facts = {"name": label, "layers": len(layers), "heads": len(maps)}
    return _told(maps, head, tokens, words, at, width_of(model), facts)


def width_of(model: nn.Module) -> int | None:
    """The hidden size of a model, where it says what it is.

    >>> width_of(kq.Attention(8, 2))
    8
    """
    config = _config(model) or model
    found = (getattr(config, name, None) for name in WIDTHS)
    return next((width for width in found if isinstance(width, int)), None)


def _config(model: nn.Module) -> Any:
    """What a model says of itself; of one that also sees or hears, what it says of its language part."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def check_length(model: nn.Module, tokens: int) -> None:
    """Refuse a text that is longer than the model takes."""
    places = (getattr(_config(model), name, None) for name in ("max_position_embeddings", "n_positions", "length"))
    most = next((count for count in places if isinstance(count, int) and count > 0), None)
    if most is not None and tokens > most:
        raise ValueError(f"the text has {tokens} tokens, and {type(model).__name__} takes {most}: give a shorter one")


def _prepared(
    source: Any, text: str | Words | None, inputs: Any, tokenizer: Any, merge: bool
) -> tuple[nn.Module, Words | None, Mapping[str, Tensor]]:
    """A live model, the words of the text if there is one, and what to run it on."""
    model, found = (source, None) if isinstance(source, nn.Module) else load_model(source)
    if text is None:
        if not isinstance(inputs, Mapping):
            raise TypeError(f"inputs must be a mapping of what the model takes, got {type(inputs).__name__}")
        return model, None, inputs
    taken = getattr(model, "main_input_name", "input_ids")
    if taken != "input_ids":
        raise ValueError(f"{type(model).__name__} takes {taken}, not text: give `inputs` from Python")
    words = text if isinstance(text, Words) else words_of(text, _tokenizer(tokenizer, found), merge)
    check_length(model, len(words.ids))
    batch = words.batch()
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        batch = {**batch, "decoder_input_ids": batch["input_ids"]}
    return model, words, batch


def _tokenizer(given: Any, found: Any) -> Any:
    if given is None and found is None:
        raise ValueError("text needs a tokenizer: none lies beside the model, and none was given")
    return found if given is None else given


def _squares(attention: Any) -> Float[ndarray, "heads n n"]:
    """Attention of one text as (heads, n, n) in float64; whatever it cannot be is told in one sentence."""
    given = _tensor(attention) if isinstance(attention, (np.ndarray, list, tuple)) else attention
    check_float("attention", given, "... n n")
    shape = tuple(given.shape)
    if len(shape) == 4 and shape[0] == 1:
        given = given[0]
    if given.ndim not in (2, 3) or shape[-1] != shape[-2]:
        raise ValueError(f"attention must be (n, n) or (heads, n, n) of one text, got {shape}")
    check_rows(given.detach().reshape(-1, *shape[-2:]))
    return given.detach().cpu().double().numpy().reshape(-1, *shape[-2:])


def check_rows(maps: Float[Tensor, "heads n n"], rows: Bool[Tensor, "heads n"] | None = None) -> None:
    """Require attention: nothing negative, and rows that sum to 1; only some `rows`, where others mean nothing.

    >>> check_rows(torch.full((1, 2, 2), 0.6))
    Traceback (most recent call last):
    ValueError: rows of attention must sum to 1, within 0.0001; row 0 of head 0 sums to 1.2
    """
    near, n = max(NEAR, torch.finfo(maps.dtype).eps), maps.shape[-1]
    lowest = int(maps.argmin())
    if maps.flatten()[lowest] < 0:
        head, row = divmod(lowest // n, n)
        least = float(maps.flatten()[lowest])
        raise ValueError(f"attention must not be negative, got {least:.3g} in row {row} of head {head}")
    sums = maps.sum(-1, dtype=torch.float64)
    far = (sums - 1).abs() if rows is None else (sums - 1).abs() * rows
    head, row = divmod(int(far.argmax()), n)
    if far[head, row] > near:
        total = float(sums[head, row])
        raise ValueError(
            f"rows of attention must sum to 1, within {near:.3g}; row {row} of head {head} sums to {total:.6g}"
        )


def _tensor(attention: Any) -> Tensor:
    try:
        return torch.as_tensor(attention)
    except (TypeError, ValueError):
        raise TypeError("attention must be a tensor, or numbers that make one: rows of equal length") from None


def _layer(layer: int | None, count: int) -> int:
    if layer is None:
        return count - 1
    check_count("layer", layer, least=-count, most=count - 1)
    return layer % count


def _told(
    maps: Float[ndarray, "heads n n"],
    head: int | Iterable[int] | None,
    tokens: Sequence[str] | None,
    words: Words | None,
    layer: int | None,
    width: int | None,
    model: dict[str, Any],
) -> Mapped:
    heads = _heads(head, len(maps))
    count = maps.shape[-1]
    if tokens is not None and (isinstance(tokens, str) or not isinstance(tokens, Iterable) or len(tokens) != count):
        raise ValueError(f"tokens must be a list of {count} texts, one for each row of the attention")
    if words is not None:
        texts, real = words.texts, words.real
    else:
        texts, real = [str(place) for place in range(count)], [True] * count
    merged = words is not None and len(words.texts) < len(words.ids)
    texts = list(map(str, tokens)) if tokens is not None else texts
    return Mapped(maps[heads], heads, layer, texts, real, merged, width, model, not np.triu(maps, 1).any())


def listed(given: Any) -> list[Any]:
    """Numbers out of a list, a tensor or an array, or the one that is given.

    >>> listed(torch.tensor([0, 2])), listed(3)
    ([0, 2], [3])
    """
    found = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else given
    return [found] if isinstance(found, str) or not isinstance(found, Iterable) else list(found)


def _heads(head: int | Iterable[int] | None, count: int) -> list[int]:
    if head is None:
        return list(range(count))
    chosen = listed(head)
    for one in chosen:
        check_count("head", one, least=0, most=count - 1)
    if not chosen:
        raise ValueError("head must name a head, got none")
    return list(dict.fromkeys(map(int, chosen)))
