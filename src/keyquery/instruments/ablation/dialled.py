"""`dial_effect`: a model as it is and with its dial turned, side by side: the loss on a text, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import nn

from keyquery.capture import Batch
from keyquery.capture.hooks import evaluating
from keyquery.checkpoints.sources import bare
from keyquery.instruments.ablation.ablate import facts_of, losses_of
from keyquery.instruments.ablation.losses import default_loss, hide, logits, real_tokens
from keyquery.reading import Reading, digests, provenance
from keyquery.support.statistics import paired
from keyquery.surgery.dial.dial import Means, dial
from keyquery.surgery.rewriting.attach import sites_of
from keyquery.surgery.selection import Selection

first = itemgetter(0)
PROMPT, ANSWER = 12, 24  # tokens of a sample's beginning, and of what the model makes of it


@dataclass(frozen=True, kw_only=True)
class DialEffect(Reading, kind="dial effect"):
    """The loss as it is and as it becomes, with the 95 % interval of the change, and samples of what the model says."""

    units: ClassVar[Mapping[str, str]] = {"before": "mean loss over sequences, nats a token"}

    model: Mapping[str, Any]
    gains: Mapping[str, float]
    heads: str
    objective: str
    sequences: int
    before: float
    after: float
    change: float
    low: float
    high: float
    samples: Sequence[Mapping[str, str]]


def dial_effect(
    model: nn.Module,
    batches: Sequence[Batch],
    tokenizer: Any,
    gains: Mapping[str, float],
    heads: Selection = None,
    *,
    means: str | None = None,
    samples: int = 3,
    name: str | None = None,
) -> DialEffect:
    """Run a language model on `batches` as it is and with `gains` on the parts of some heads; means are of the batches.

    A decoder goes on from the beginnings of some sequences, an encoder fills in hidden words, without chance.

    >>> from keyquery.checkpoints.tokenizer import Tokenizer
    >>> from keyquery.layers import LanguageModel
    >>> model, tokenizer = LanguageModel.load(kq.models.DECODER), Tokenizer.load(kq.models.DECODER)
    >>> ids = torch.tensor(tokenizer.encode(kq.models.TEXT.read_text())[:512])
    >>> dial_effect(model, [{"input_ids": ids.reshape(32, 16)}], tokenizer, {"position": 0}, samples=0).change > 0
    True
    """
    model = bare(model)
    objective, loss = default_loss(model, tokenizer)
    measured = Means(model, batches, means)
    placed = measured.kind == "position" or any(site.placed for site in sites_of(model).values())
    if not placed and any(gains.get(part, 1) != 1 for part in ("position", "query_only")):
        raise ValueError("this model has no positional term in its scores: gains on it have no effect")
    before, said = losses_of(model, batches, loss), _says(model, batches, tokenizer, objective, samples)
    with dial(model, **dict(gains), heads=heads, data=measured):  # type: ignore[arg-type]
        after, then = losses_of(model, batches, loss), _says(model, batches, tokenizer, objective, samples)
    change, low, high = paired(before, after)
    return DialEffect(
        model=facts_of(model, name),
        gains=dict(gains),
        heads="all" if heads is None else str(heads),
        objective=objective,
        sequences=len(before),
        before=float(before.mean()),
        after=float(after.mean()),
        change=change,
        low=low,
        high=high,
        samples=[{**one, "turned": other["says"]} for one, other in zip(said, then, strict=True)],
        provenance=provenance(tensors=digests(model.state_dict()), means=measured.kind),
    )


def _says(
    model: nn.Module, batches: Sequence[Batch], tokenizer: Any, objective: str, samples: int
) -> list[dict[str, str]]:
    """What the model makes of the first sequences."""
    with evaluating(model):
        rows = [
            {name: tensor[row : row + 1] for name, tensor in batch.items()}
            for batch in batches
            for row in range(len(batch["input_ids"]))
        ]
        speak = _goes_on if objective == "next token" else _fills_in
        return [speak(model, row, tokenizer) for row in rows[:samples]]


def _goes_on(model: nn.Module, row: Batch, tokenizer: Any) -> dict[str, str]:
    """The most likely tokens after a beginning, one by one."""
    ids = row["input_ids"][real_tokens(row)][:PROMPT]
    count = len(ids)
    for _ in range(ANSWER):
        ids = torch.cat((ids, logits(model, {"input_ids": ids[None]})[0, -1].argmax().cpu()[None]))
    return {"text": tokenizer.decode(ids[:count].tolist()), "says": tokenizer.decode(ids[count:].tolist())}


def _fills_in(model: nn.Module, row: Batch, tokenizer: Any) -> dict[str, str]:
    """A sequence with words hidden, and the words that the model puts there."""
    mask = tokenizer.mask_token_id
    hidden = hide(row, set(getattr(tokenizer, "all_special_ids", [])) | {mask})
    masked = {**row, "input_ids": row["input_ids"].masked_fill(hidden, mask)}
    filled = logits(model, masked)[0].argmax(-1).cpu()[hidden[0]]
    words = [tokenizer.decode([number]).strip() for number in filled.tolist()]
    seen, text = real_tokens(row)[0], ""
    pairs = zip(hidden[0, seen].tolist(), row["input_ids"][0, seen].tolist(), strict=True)
    for gap, found in groupby(pairs, first):
        numbers = [number for _, number in found]
        text += " ___" * len(numbers) if gap else tokenizer.decode(numbers)
    return {"text": text, "says": ", ".join(words)}
