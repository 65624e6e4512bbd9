"""A few tokens of the data, and every head's scores on them, in the parts of `forms.parts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.capture import Batch, queries_and_keys
from keyquery.capture.scores.position_means import PositionMeans
from keyquery.checkpoints import Heads, Layer
from keyquery.forms.parts import PARTS, score_parts
from keyquery.reading import short

DIGITS = 4  # significant ones that are kept of a score


@dataclass(frozen=True, eq=False)
class Sample:
    """The first tokens of the data, and the queries and keys that each layer makes of them, (heads, n, r)."""

    tokens: list[str]
    projected: Mapping[int, tuple[Tensor, Tensor]]
    notes: list[str]  # why the softmax of the scores is not quite the model's attention

    def told(self) -> dict[str, Any]:
        """The sample as a reading holds it: its tokens, and notes where there are any."""
        return {"tokens": self.tokens, **({"notes": self.notes} if self.notes else {})}

    def scores(self, layer: Layer, heads: Heads, means: PositionMeans, by_position: bool) -> list[dict[str, Any]]:
        """Head by head, the parts of the scaled scores, query by key, as rounded lists."""
        query, key = (projected.double() for projected in self.projected[layer.index])
        places = torch.arange(query.shape[-2])
        bias = heads.position_bias(layer, (places - places[:, None]).flatten())
        bias = None if bias is None else bias.reshape(len(query), len(places), len(places)).to(query)
        if by_position:
            mean_query, mean_key = (mean[0].to(query) for mean in means.at(places[None]))
        else:
            mean_query, mean_key = (mean[:, None].to(query).expand_as(query) for mean in means.everywhere())
        parts = score_parts(layer.scale * query, key, mean_query, mean_key, places, layer.rope, bias)
        return [
            {name: short(part[head].tolist(), DIGITS) for name, part in zip(PARTS, parts, strict=True)}
            for head in range(len(query))
        ]


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
