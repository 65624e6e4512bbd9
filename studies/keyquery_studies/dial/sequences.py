"""Sequences for measuring abilities: windows of texts, and random tokens, each with the special tokens of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from keyquery.listening import Batch
from keyquery.listening.inputs.encoding import encoded, special_tokens
from keyquery.listening.parts.on_data import SEQUENCES

NOTHING = -100  # a target that is ignored
# Windows that a text is cut into at least, shorter ones if it must be: a third is measured, and the rest is enough for
# means by position.
FEWEST = 3 * SEQUENCES // 2


@dataclass(frozen=True, eq=False)
class Sequences:
    """Input sequences, and the target of each token, NOTHING for most."""

    inputs: Batch
    targets: Int[Tensor, "batch n"] | None = None


class Material:
    """A model's tokens: encoded texts, a pool for random sequences, and special tokens around a sequence."""

    def __init__(self, texts: Mapping[str, str], tokenizer: Any, causal: bool, vocabulary: int) -> None:
        if tokenizer is None:
            raise ValueError("the model has no tokenizer beside it, so no text can be encoded")
        self.before, self.after = special_tokens(tokenizer, *texts.values())
        if causal:
            self.after = []  # end-of-text tokens are not evaluated
        self.mask: int | None = getattr(tokenizer, "mask_token_id", None)
        known = (*getattr(tokenizer, "all_special_ids", ()), self.mask, getattr(tokenizer, "pad_token_id", None))
        self.special = {number for number in known if number is not None}
        self.texts = {name: torch.tensor(encoded(tokenizer, text), dtype=torch.long) for name, text in texts.items()}
        self.pool = torch.tensor(sorted(set(torch.cat(list(self.texts.values())).tolist()) - self.special))
        self.vocabulary = vocabulary

    def windows(self, text: str, count: int, length: int, second: bool = False) -> Int[Tensor, "some n"]:
        """Up to `count` evenly spaced, non-overlapping windows of a text, with special tokens.

        Every third window of the text is for evaluation; the others (`second`) are for means, which are thus taken over
        other text.
        """
        ids, room = self.texts[text], length - len(self.before) - len(self.after)
        cut = max(FEWEST, len(ids) // room)
        room = min(room, len(ids) // cut)
        if room < 2:
            raise ValueError(f"{text} is too short: {len(ids)} tokens, expected at least {2 * FEWEST}")
        numbers = torch.arange(cut)
        numbers = numbers[(numbers % 3 > 0) == second]
        count = min(count, len(numbers))
        starts = len(ids) // cut * numbers[torch.arange(count) * len(numbers) // count]
        return self.framed(ids[starts[:, None] + torch.arange(room)])

    def random(self, count: int, length: int, seed: int) -> Int[Tensor, "count length"]:
        """Rows of random tokens without repetition, from the vocabulary of the texts if it is large enough."""
        pool = self.pool
        if len(pool) < length:  # too few distinct tokens in the texts
            pool = torch.tensor(sorted(set(range(self.vocabulary)) - self.special))
        if len(pool) < length:
            raise ValueError(f"length must be at most {len(pool)}, the number of tokens there are, got {length}")
        generator = torch.Generator().manual_seed(seed)
        return torch.stack([pool[torch.randperm(len(pool), generator=generator)[:length]] for _ in range(count)])

    def framed(self, ids: Int[Tensor, "count n"]) -> Int[Tensor, "count framed"]:
        """Ids with the special tokens the model expects before and after them, such as BOS."""
        before, after = (
            torch.tensor(special, dtype=torch.long).expand(len(ids), -1) for special in (self.before, self.after)
        )
        return torch.cat((before, ids, after), 1)
