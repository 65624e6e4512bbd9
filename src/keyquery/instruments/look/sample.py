"""A few tokens of the data, with every head's scores on them, by the parts of `forms.parts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.forms.parts import score_parts
from keyquery.listening import Batch, queries_and_keys
from keyquery.listening.inputs.encoding import token_text
from keyquery.listening.parts.means import PositionMeans
from keyquery.listening.parts.variance import add_term
from keyquery.reading import short

DIGITS = 4  # significant digits kept of a score


@dataclass(frozen=True, eq=False)
class Sample:
    """The first tokens of the data, and their queries and keys per layer, (heads, n, r)."""

    facts: dict[str, Any]  # tokens, and notes on why the softmax of the scores may differ from the model's attention
    projected: Mapping[int, tuple[Tensor, Tensor]]

    def scores(self, layer: Layer, heads: Heads, means: PositionMeans, by_position: bool) -> list[dict[str, Any]]:
        """The parts of the scaled scores per head, query by key, as rounded lists."""
        query, key = (projected.double() for projected in self.projected[layer.index])
        positions = torch.arange(query.shape[-2])
        bias = heads.pair_bias(layer, positions, positions)
        bias = None if bias is None else bias.to(query)
        if by_position:
            mean_query, mean_key = (mean[0].to(query) for mean in means.at(positions[None]))
        else:
            mean_query, mean_key = (mean[:, None].to(query).expand_as(query) for mean in means.everywhere())
        scaled = layer.scale * query
        parts = score_parts(scaled, key, mean_query, mean_key, positions, layer.rope, bias)._asdict()
        for term in heads.relatives(layer, positions, positions):
            add_term(parts, term.of_scaled(layer.scale), scaled, key, mean_query, mean_key)
        return [
            {name: short(part[head].tolist(), DIGITS) for name, part in parts.items()} for head in range(len(query))
        ]


def take(model: nn.Module, batches: Sequence[Batch], heads: Heads, count: int, tokenizer: Any = None) -> Sample | None:
    """Run the model on the first `count` tokens alone of the first sequence of at least two; None if there is none."""
    batch = _first(batches, count) if count else None
    if batch is None:
        return None
    ids = batch["input_ids"][0].tolist()
    projected = {}
    for index, (query, key) in queries_and_keys(model, batch, heads).items():
        # A block shared by several layers has seen the tokens several times: keep the first.
        if query.shape[-2] % len(ids) == 0:
            projected[index] = (query[..., : len(ids), :], key[..., : len(ids), :])
    notes = _notes(heads.config, len(ids))
    facts = {"tokens": [token_text(number, tokenizer) for number in ids], **({"notes": notes} if notes else {})}
    return Sample(facts, projected)


def _first(batches: Sequence[Batch], count: int) -> Batch | None:
    """One sequence of at most `count` non-padding tokens, as a batch."""
    for batch in batches:
        if "input_ids" not in batch:
            return None
        ids = batch["input_ids"]
        for row in range(len(ids)):
            real = batch["attention_mask"][row].bool() if "attention_mask" in batch else torch.ones_like(ids[row]) > 0
            if int(real.sum()) > 1:
                per_token = {name: t for name, t in batch.items() if t.shape[:2] == ids.shape[:2]}
                others = {name: t[row : row + 1] for name, t in batch.items() if name not in per_token}
                return {**others, **{name: t[row][real][:count].unsqueeze(0) for name, t in per_token.items()}}
    return None


def _notes(config: Mapping[str, Any], tokens: int) -> list[str]:
    """What a model does to its scores before the softmax that the parts do not include."""
    reach = {"sliding_window": 1, "window_size": 1, "local_attention": 2}  # the last one counts both sides
    windows = [config[key] // sides for key, sides in reach.items() if isinstance(config.get(key), int)]
    conditions = {
        "the model soft-caps its scores before the softmax": bool(config.get("attn_logit_softcapping")),
        "the model has an attention sink in its softmax": config.get("model_type") == "gpt_oss",
        "in MLA the nope and rope scores of a head add up": "qk_nope_head_dim" in config,
        "some layers have a sliding window of fewer tokens": any(window < tokens for window in windows),
    }
    return [note for note, holds in conditions.items() if holds]
