"""`dial_effect`: a language model before and after dialling: its loss on a text, and samples of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from keyquery.checkpoints.sources import bare
from keyquery.instruments.ablation.ablate import facts_of
from keyquery.instruments.ablation.losses import (
    IGNORED,
    Objective,
    default_loss,
    logits,
    losses_of,
    next_token_loss,
    real_tokens,
)
from keyquery.instruments.ablation.named import PLACED
from keyquery.intervene.dial.dial import dial
from keyquery.intervene.dial.means import Means
from keyquery.intervene.rewrites import sites_of
from keyquery.intervene.selection import Selection
from keyquery.listening import Batch
from keyquery.listening.hooks import evaluating
from keyquery.listening.parts.on_data import rows_of
from keyquery.reading import Reading, digests, provenance
from keyquery.support.progress import Progress, silent
from keyquery.support.statistics import paired

PROMPT, ANSWER = 12, 24  # tokens of a prompt, and of its continuation


@dataclass(frozen=True, kw_only=True)
class DialEffect(Reading, kind="dial effect"):
    """Loss before and after, the change with its 95 % interval, and samples of the model's output."""

    units: ClassVar[Mapping[str, str]] = {"before": "mean loss over sequences, nats per token"}

    model: Mapping[str, Any]  # name and facts of the model
    gains: Mapping[str, float]  # by part
    heads: str  # that were dialled
    objective: str  # "next token" or "masked"
    sequences: int  # that were run
    before: float
    after: float  # mean loss with the gains
    change: float  # after − before
    low: float  # end of the 95 % interval
    high: float  # end of the 95 % interval
    samples: Sequence[Mapping[str, str]]  # texts before and after


def dial_effect(
    model: nn.Module,
    batches: Sequence[Batch],
    tokenizer: Any,
    gains: Mapping[str, float],
    heads: Selection = None,
    *,
    means: str | None = None,
    directions: Sequence[int] = (),
    of: str = "singular",
    gain: float = 0.0,
    on: str = "weights",
    samples: int = 3,
    name: str | None = None,
    progress: Progress | None = None,
) -> DialEffect:
    """Run a language model on `batches`, whose means are used, unchanged and with `gains` on parts or directions."""
    model = bare(model)
    loss = default_loss(model, tokenizer)
    if directions and not isinstance(heads, str):
        raise ValueError("directions are those of single heads: name them, such as 18.6")
    about = Means(model, batches, means) if not directions or on == "data" else None
    options: dict[str, Any] = {**gains, "data": about}
    if directions:
        chosen = dict.fromkeys(str(heads).split(","), directions)
        options |= {"directions": chosen, "of": of, "gain": gain, "on": on}
        gains = {f"{of} direction {number}": gain for number in directions}
    else:
        options["heads"] = heads
        by_position = about is not None and about.kind == "position"
        moved = any(gains.get(part, 1) != 1 for part in PLACED)
        if moved and not (by_position or any(site.placed for site in sites_of(model).values())):
            raise ValueError("this model has no positional term in its scores: gains on it have no effect")
    single = (
        {name: x[row : row + 1] for name, x in batch.items()} for batch in batches for row in range(rows_of(batch))
    )
    rows = list(islice(single, samples))

    def run(what: str) -> tuple[Tensor, list[dict[str, str]]]:
        losses = losses_of(model, (progress or silent)(batches, what, len(batches)), loss)
        with evaluating(model):
            return losses, [_sample(model, row, tokenizer, loss) for row in rows]

    before, texts = run("running the model")
    with dial(model, **options):
        after, dialled = run("running it dialled")
    return DialEffect(
        model=facts_of(model, name),
        gains=dict(gains),
        heads="all" if heads is None else str(heads),
        objective=loss.name,
        sequences=len(before),
        before=float(before.mean()),
        after=float(after.mean()),
        **paired(before, after)._asdict(),
        samples=[{**text, "turned": other["says"]} for text, other in zip(texts, dialled, strict=True)],
        provenance=provenance(tensors=digests(model.state_dict()), means=None if about is None else about.kind),
    )


def _sample(model: nn.Module, row: Batch, tokenizer: Any, loss: Objective) -> dict[str, str]:
    """A greedy continuation, or a sequence with masked tokens and what the model predicts there."""
    return _continue(model, row, tokenizer) if loss is next_token_loss else _fill_in(model, row, tokenizer, loss)


def _continue(model: nn.Module, row: Batch, tokenizer: Any) -> dict[str, str]:
    ids = row["input_ids"][real_tokens(row)][:PROMPT]
    count = len(ids)
    for _ in range(ANSWER):
        ids = torch.cat((ids, logits(model, {"input_ids": ids[None]})[0, -1].argmax().cpu()[None]))
    return {"text": tokenizer.decode(ids[:count].tolist()), "says": tokenizer.decode(ids[count:].tolist())}


def _fill_in(model: nn.Module, row: Batch, tokenizer: Any, loss: Objective) -> dict[str, str]:
    masked, labels = loss.task(model, row)
    hidden = torch.as_tensor(labels) != IGNORED
    filled = logits(model, masked)[0].argmax(-1).cpu()[hidden[0]]
    words = [tokenizer.decode([number]).strip() for number in filled.tolist()]
    seen, text = real_tokens(row)[0], ""
    pairs = zip(hidden[0, seen].tolist(), row["input_ids"][0, seen].tolist(), strict=True)
    for masked_run, run in groupby(pairs, itemgetter(0)):
        numbers = [number for _, number in run]
        text += " ___" * len(numbers) if masked_run else tokenizer.decode(numbers)
    return {"text": text, "says": ", ".join(words)}
