"""Vectors of words by a pretrained text encoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from keyquery.listening.inputs.load import load_model

WORDS = 256  # per forward pass


class WordEncoder:
    """Words as vectors: the mean of the last hidden states of a text encoder over the tokens of each word.

    The encoder is not trained; vectors have mean 0 and variance 1.
    """

    def __init__(self, source: Any) -> None:
        if isinstance(source, (str, Path)):
            source = load_model(source)
        if not isinstance(source, (tuple, list)) or len(source) != 2 or not isinstance(source[0], nn.Module):
            raise TypeError(f"text_encoder must be a folder or a pair (model, tokenizer), got {type(source).__name__}")
        self.model, self.tokenizer = source
        if self.tokenizer is None:
            raise ValueError("text_encoder must have a tokenizer in its folder: pass a pair (model, tokenizer)")

    @torch.no_grad()
    def vectors(self, words: Sequence[str]) -> Float[Tensor, "words dim"]:
        """Vectors of words, in their order."""
        self.model.eval()
        parts = []
        for first in range(0, len(words), WORDS):
            batch = self.tokenizer(list(words[first : first + WORDS]), padding=True, return_tensors="pt")
            batch = {name: part.to(next(self.model.parameters()).device) for name, part in batch.items()}
            states = getattr(self.model(**batch), "last_hidden_state", None)
            if states is None:
                raise ValueError(
                    f"text_encoder must have hidden states, which {type(self.model).__name__} does not return"
                )
            real = batch["attention_mask"].unsqueeze(-1)
            mean = (states.float() * real).sum(1) / real.sum(1)
            parts.append(layer_norm(mean, mean.shape[-1:]).cpu())
        return torch.cat(parts)
