"""Vectors of words by a pretrained text encoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from keyquery.listening.hooks import running
from keyquery.listening.inputs.load import load_model

WORDS = 256  # per forward pass


def word_vectors(source: Any, words: Sequence[str]) -> Float[Tensor, "words dim"]:
    """Words as vectors: the mean of the last hidden states of a text encoder over the tokens of each word.

    `source` is a folder, or a pair (model, tokenizer). The vectors have mean 0 and variance 1.
    """
    if isinstance(source, (str, Path)):
        source = load_model(source)
    if not isinstance(source, (tuple, list)) or len(source) != 2 or not isinstance(source[0], nn.Module):
        raise TypeError(f"text_encoder must be a folder or a pair (model, tokenizer), got {type(source).__name__}")
    model, tokenizer = source
    if tokenizer is None:
        raise ValueError("text_encoder must have a tokenizer in its folder: pass a pair (model, tokenizer)")
    parts = []
    with running(model) as run:
        for first in range(0, len(words), WORDS):
            batch = tokenizer(list(words[first : first + WORDS]), padding=True, return_tensors="pt")
            states = getattr(run(batch), "last_hidden_state", None)
            if states is None:
                raise ValueError(f"text_encoder must have hidden states, which {type(model).__name__} does not return")
            real = batch["attention_mask"].unsqueeze(-1).to(states.device)
            mean = (states.float() * real).sum(1) / real.sum(1)
            parts.append(layer_norm(mean, mean.shape[-1:]).cpu())
    return torch.cat(parts)
