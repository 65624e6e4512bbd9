"""What abilities are tried on: windows of texts, and random tokens, each framed as a model expects it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from keyquery.capture import Batch

NOTHING = -100  # a target where nothing is asked
FEWEST = 4  # windows that a text is cut into at least, shorter ones if it must be: fewer say nothing of their spread


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences that a model is run on, and what is asked of each of their tokens, NOTHING of most."""

    inputs: Batch
    targets: Int[Tensor, "batch n"] | None = None


class Material:
    """A model's tokens: texts as ids, a pool to draw random ones from, and what stands before and after a sequence."""

    def __init__(self, texts: Mapping[str, str], tokenizer: Any, causal: bool, vocabulary: int) -> None:
        self.before, self.after = _frame(tokenizer)
        if causal:
            self.after = []  # what ends a text is not what it is measured by
        self.mask: int | None = getattr(tokenizer, "mask_token_id", None)
        known = (*getattr(tokenizer, "all_special_ids", ()), self.mask, getattr(tokenizer, "pad_token_id", None))
        self.special = {number for number in known if number is not None}
        self.texts = {name: torch.tensor(_ids(tokenizer, text), dtype=torch.long) for name, text in texts.items()}
        self.pool = torch.tensor(sorted(set(torch.cat(list(self.texts.values())).tolist()) - self.special))
        self.vocabulary = vocabulary

    def windows(self, text: str, count: int, length: int, second: bool = False) -> Int[Tensor, "some n"]:
        """Windows of a text, as many as there are up to `count`, evenly spread, none over another; framed.

        The `second` ones stand between the first, so that means can be taken of text that is not measured.
        """
        ids, room = self.texts[text], length - len(self.before) - len(self.after)
        pairs = min(count, max(FEWEST, len(ids) // (2 * room)))
        room = min(room, len(ids) // (2 * pairs))
        if room < 2:
            raise ValueError(f"{text} is too short: {len(ids)} tokens, expected at least {4 * FEWEST}")
        stride = len(ids) // (2 * pairs)
        starts = stride * torch.arange(int(second), 2 * pairs, 2)
        return self.framed(ids[starts[:, None] + torch.arange(room)])

    def random(self, count: int, length: int, seed: int) -> Int[Tensor, "count length"]:
        """Rows of random tokens, none twice in a row: of those that the texts hold, if they hold enough."""
        pool = self.pool
        if len(pool) < length:  # a text that short would repeat itself
            pool = torch.tensor(sorted(set(range(self.vocabulary)) - self.special))
        if len(pool) < length:
            raise ValueError(f"length must be at most {len(pool)}, the number of tokens there are, got {length}")
        generator = torch.Generator().manual_seed(seed)
        return torch.stack([pool[torch.randperm(len(pool), generator=generator)[:length]] for _ in range(count)])

    def framed(self, ids: Int[Tensor, "count n"]) -> Int[Tensor, "count framed"]:
        """Ids with what the model expects before and after them, such as a token that begins a text."""
        before, after = (
            torch.tensor(some, dtype=torch.long).expand(len(ids), -1) for some in (self.before, self.after)
        )
        return torch.cat((before, ids, after), 1)


def _ids(tokenizer: Any, text: str) -> list[int]:
    """A whole text as ids, nothing added."""
    if tokenizer is None:
        raise ValueError("the model has no tokenizer beside it, so that no text can be read")
    if not hasattr(tokenizer, "num_special_tokens_to_add"):  # keyquery's own adds nothing
        return list(tokenizer(text)["input_ids"])
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a text."""
    bare, whole = _ids(tokenizer, "a"), list(tokenizer("a")["input_ids"])
    at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:at], whole[at + len(bare) :]
