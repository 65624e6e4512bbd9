"""Models under study and their tokens: windows of texts and random tokens, each with the model's special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from keyquery.checkpoints import read
from keyquery.intervene.rewrites import sites_of
from keyquery.listening.inputs.batches import encoded, special_tokens
from keyquery.listening.inputs.load import load_model
from keyquery.listening.parts.on_data import SEQUENCES

# Windows that a text is cut into at least, shorter ones if it must be: a third is measured, and the rest is enough for
# means by position.
FEWEST = 3 * SEQUENCES // 2


@dataclass(frozen=True, eq=False)
class Subject:
    """A model under study, its tokenizer, and facts about it."""

    model: nn.Module
    tokenizer: Any
    facts: Mapping[str, Any]
    heads: Mapping[int, int]  # number of heads per layer
    placed: bool  # whether its scores have a position term, as with RoPE

    @classmethod
    def load(cls, source: str | Path, device: str) -> Subject:
        """The model of a folder or a .gguf file, with its LM head if it has one."""
        try:
            model, tokenizer = load_model(source, lm_head=True)
            lm_head = True
        except ValueError:  # a sentence encoder has none; any other error is raised again below
            model, tokenizer = load_model(source)
            lm_head = False
        name = Path(source).absolute().name.removesuffix(".gguf")
        return cls.of(name, model.to(device).eval(), tokenizer, lm_head, precision(source))

    @classmethod
    def of(cls, name: str, model: nn.Module, tokenizer: Any, lm_head: bool = True, stored: str = "") -> Subject:
        """A live model under a name."""
        layers, sites = read(model), sites_of(model)
        heads = {index: site.count for index, site in sites.items()}
        facts = {"name": name, "family": layers.model["family"], "layers": len(heads), "heads": sum(heads.values())}
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
        facts |= {"causal": layers[0].causal, "lm_head": lm_head, "precision": stored, "vocabulary": vocabulary}
        return cls(model, tokenizer, facts, heads, any(site.placed for site in sites.values()))

    def places(self) -> int | None:
        """Its maximum number of positions, if its config has one."""
        config = getattr(self.model, "config", None)
        limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "length"))
        return next((count for count in limits if isinstance(count, int)), None)


def precision(source: str | Path) -> str:
    """How a checkpoint stores the queries of its first layer: a dtype, or a kind of quantisation."""
    heads = read(source)
    modules, tensors = heads[0].modules, heads.source
    roles = [modules[role] for role in ("query", "fused", "query_down", "module") if role in modules]
    name = next(name for name in tensors.shapes if roles and name.startswith(roles[0]))
    stored = getattr(tensors, "stored", None)  # quantised files are dequantised on read
    return str(stored(name) if stored else tensors.rows(name, 0, 1).dtype).removeprefix("torch.")


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
