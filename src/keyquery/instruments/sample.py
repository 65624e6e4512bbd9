"""A few tokens of the data, and every head's scores on them: what it compares, points at and follows, in the words.

With q = q̄ + q′ and k = k̄ + k′ (q̄, k̄ the means over all data) and R the model's rotation, if it has one,

    score_ij = pairs_ij + popularity_ij + position_ij
    pairs_ij = scale·q′ᵢR(j−i)k′ⱼ    popularity_ij = scale·q̄R(j−i)k′ⱼ    position_ij = scale·qᵢR(j−i)k̄ + bias(j−i)

and k′ᵢR(j−i)q′ⱼ = pairs_ji, so that the reciprocal part is ½(pairs + pairsᵀ), the directional ½(pairs − pairsᵀ).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.capture import Batch, queries_and_keys
from keyquery.checkpoints import Heads, Layer
from keyquery.forms import Rope
from keyquery.reading import short

DIGITS = 4  # significant ones that are kept of a score


class Scores(NamedTuple):
    """The parts of every head's scores, (heads, n, n), query by key."""

    pairs: Float[Tensor, "heads n n"]
    popularity: Float[Tensor, "heads n n"]
    position: Float[Tensor, "heads n n"] | None  # None: the same for every key, and softmax does not see it


@dataclass(frozen=True, eq=False)
class Sample:
    """The first tokens of the data, and the queries and keys that each layer makes of them, (heads, n, r)."""

    tokens: list[str]
    projected: Mapping[int, tuple[Tensor, Tensor]]
    notes: list[str]  # why the softmax of the scores is not quite the model's attention

    def told(self) -> dict[str, Any]:
        """The sample as a reading holds it: its tokens, and notes where there are any."""
        return {"tokens": self.tokens, **({"notes": self.notes} if self.notes else {})}

    def scores(self, layer: Layer, heads: Heads, mean: Float[Tensor, "heads m"]) -> list[dict[str, Any]]:
        """Head by head, the parts of the scores as rounded lists; `mean` is that of [q; k] over all data."""
        places = torch.arange(len(self.tokens))
        bias = heads.position_bias(layer, (places - places[:, None]).flatten())
        query, key = (t.double() for t in self.projected[layer.index])
        bias = None if bias is None else bias.reshape(len(query), len(places), len(places))
        parts = split_scores(query, key, mean, layer.scale, layer.rope, bias)
        cells = []
        for head in range(len(query)):
            crowd = parts.popularity[head] if layer.rope is not None else parts.popularity[head, 0]
            where = None if parts.position is None else short(parts.position[head].tolist(), DIGITS)
            pairs = short(parts.pairs[head].tolist(), DIGITS)
            cells.append({"pairs": pairs, "popularity": short(crowd.tolist(), DIGITS), "position": where})
        return cells


def take(model: nn.Module, batches: Sequence[Batch], heads: Heads, count: int, tokenizer: Any = None) -> Sample | None:
    """Run the model on the first `count` tokens of the first sequence that has two; None without, or without token ids.

    The sequence is cut before it is run, so that the scores are all that the softmax of those tokens sees.
    """
    batch = _first(batches, count) if count else None
    if batch is None:
        return None
    ids = batch["input_ids"][0].tolist()
    projected = {}
    for index, (query, key) in queries_and_keys(model, batch, heads).items():
        # A block that is shared by all layers has seen the tokens several times, first in its own first place.
        if query.shape[-2] % len(ids) == 0:
            projected[index] = (query[..., : len(ids), :], key[..., : len(ids), :])
    return Sample([_text(number, tokenizer) for number in ids], projected, _notes(heads.config, len(ids)))


def split_scores(
    query: Float[Tensor, "heads n r"],
    key: Float[Tensor, "heads n r"],
    mean: Float[Tensor, "heads m"],
    scale: float,
    rope: Rope | None = None,
    bias: Float[Tensor, "heads n n"] | None = None,
) -> Scores:
    """The parts of the scaled scores of queries and keys at places 0 to n − 1; `mean` is that of [q; k].

    >>> parts = split_scores(*torch.randn(2, 1, 3, 4), torch.zeros(1, 8), scale=0.5)
    >>> parts.pairs.shape, parts.popularity.any(), parts.position
    (torch.Size([1, 3, 3]), tensor(False), None)
    """
    rank = query.shape[-1]
    mean_query, mean_key = mean[:, None, :rank].expand_as(query), mean[:, None, rank:].expand_as(key)

    def score(one: Tensor, other: Tensor) -> Tensor:
        if rope is not None:
            places = torch.arange(one.shape[-2])
            one, other = rope.rotate(one, places), rope.rotate(other, places)
        return scale * one @ other.mT

    position = None
    if rope is not None or bias is not None:
        position = score(query, mean_key) + (0 if bias is None else bias)
    return Scores(score(query - mean_query, key - mean_key), score(mean_query, key - mean_key), position)


def _first(batches: Sequence[Batch], count: int) -> Batch | None:
    """One sequence of at most `count` real tokens, as a batch that the model takes."""
    for batch in batches:
        if "input_ids" not in batch:
            return None
        ids = batch["input_ids"]
        for row in range(len(ids)):
            real = batch["attention_mask"][row].bool() if "attention_mask" in batch else torch.ones_like(ids[row]) > 0
            if int(real.sum()) > 1:
                alike = {name: t for name, t in batch.items() if t.shape[:2] == ids.shape[:2]}
                others = {name: t[row : row + 1] for name, t in batch.items() if name not in alike}
                return {**others, **{name: t[row][real][:count].unsqueeze(0) for name, t in alike.items()}}
    return None


def _notes(config: Mapping[str, Any], tokens: int) -> list[str]:
    """What a model does between scores and attention that is no part of a score."""
    reach = {"sliding_window": 1, "window_size": 1, "local_attention": 2}  # the last one counts both sides
    windows = [config[key] // sides for key, sides in reach.items() if isinstance(config.get(key), int)]
    held = {
        "the model also caps its scores before the softmax": bool(config.get("attn_logit_softcapping")),
        "a sink takes part of the model's softmax": config.get("model_type") == "gpt_oss",
        "the scores of a latent head's two kernels add up in the model": "qk_nope_head_dim" in config,
        "some layers of the model see a window of fewer tokens": any(window < tokens for window in windows),
    }
    return [note for note, holds in held.items() if holds]


def _text(number: int, tokenizer: Any) -> str:
    """The text of a token, or its number where nothing speaks for it."""
    text = tokenizer.decode([number]) if hasattr(tokenizer, "decode") else ""
    return text if text and "\ufffd" not in text else f"#{number}"
