"""Sequences that roles are measured on: repeated random tokens, and needles in haystacks of random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from keyquery.listening.inputs.batches import special_tokens

KEY, VALUE = 8, 8  # tokens of a needle: those that ask for it, and those that are to be copied
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The ordinary tokens of a model, and the special tokens around a sequence."""

    pool: Int[Tensor, " tokens"]
    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, size: int, tokenizer: Any, config: Any) -> Vocabulary:
        """Of a model with `size` embeddings; `tokenizer` may be None, then nothing stands around a sequence."""
        before, after = ([], []) if tokenizer is None else special_tokens(tokenizer)
        known = [config.get(name) for name in SPECIAL]
        if tokenizer is not None:
            names = ("mask_token_id", "pad_token_id")
            known += [*getattr(tokenizer, "all_special_ids", ()), *(getattr(tokenizer, name, None) for name in names)]
            size = min(size, len(tokenizer)) if hasattr(tokenizer, "__len__") else size
        special = {i for ids in known for i in (ids if isinstance(ids, list) else [ids]) if i is not None}
        return cls(torch.tensor(sorted(set(range(size)) - special - {*before, *after})), before, after)

    def random(self, count: int, length: int, generator: torch.Generator) -> Int[Tensor, "count length"]:
        """Rows of random tokens: none twice in a row, unless there are fewer, as in models of proteins."""
        if len(self.pool) < length:
            return self.pool[torch.randint(len(self.pool), (count, length), generator=generator)]
        rows = [torch.randperm(len(self.pool), generator=generator)[:length] for _ in range(count)]
        return self.pool[torch.stack(rows)]

    def framed(self, ids: Int[Tensor, "count n"], first: Int[Tensor, "count 1"]) -> Int[Tensor, "count framed"]:
        """Ids with special tokens around them; `first` stands in front if there are none, to take the sink's place."""
        before, after = (
            torch.tensor(special, dtype=torch.long).expand(len(ids), -1) for special in (self.before, self.after)
        )
        return torch.cat((before if self.before else first, ids, after), 1)

    def room(self, length: int) -> int:
        """How many tokens of a sequence are not special."""
        return length - max(len(self.before), 1) - len(self.after)


def repeated(vocabulary: Vocabulary, count: int, length: int, seed: int) -> Int[Tensor, "count n"]:
    """Random tokens and the same again, [r; r], as in Olsson et al. (2022)."""
    half = vocabulary.room(length) // 2
    if half < 2:
        raise ValueError(
            f"length must be at least {length + 4 - vocabulary.room(length)}, for two repeats, got {length}"
        )
    drawn = vocabulary.random(count, half + 1, torch.Generator().manual_seed(seed))
    return vocabulary.framed(torch.cat((drawn[:, 1:], drawn[:, 1:]), 1), drawn[:, :1])


@dataclass(frozen=True, eq=False)
class Needles:
    """Sequences whose last `VALUE` queries have to copy the value of a needle, and where each value token stands."""

    ids: Int[Tensor, "count n"]
    answers: Int[Tensor, "count value"]  # the token that each of the last queries has to predict
    targets: Int[Tensor, "count value"]  # its position in the needle


def needles(vocabulary: Vocabulary, count: int, length: int, seed: int) -> Needles | None:
    """A needle (key, value) in a haystack of other tokens, then its key and value again; None with too few tokens."""
    asked = KEY + VALUE - 1
    room = length - max(len(vocabulary.before), 1) - asked - KEY - VALUE
    if room < 1:
        raise ValueError(f"length must be at least {length + 1 - room}, for a needle in a haystack, got {length}")
    if len(vocabulary.pool) < 1 + KEY + VALUE + room:
        return None
    generator = torch.Generator().manual_seed(seed)
    drawn = vocabulary.random(count, 1 + KEY + VALUE + room, generator)
    first, needle, hay = drawn.split((1, KEY + VALUE, room), 1)
    depths = torch.randint(room + 1, (count,), generator=generator).tolist()
    stacks = [torch.cat((h[:depth], n, h[depth:])) for h, n, depth in zip(hay, needle, depths, strict=True)]
    framed = vocabulary.framed(torch.cat((torch.stack(stacks), needle[:, :-1]), 1), first)
    ids = framed[:, : framed.shape[1] - len(vocabulary.after)]  # nothing may follow the last query
    start = max(len(vocabulary.before), 1) + torch.tensor(depths)[:, None] + KEY
    return Needles(ids, needle[:, KEY:], start + torch.arange(VALUE))
