"""`dial_effect`: a language model before and after dialling: its loss on a text, and samples of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import nn

from keyquery.checkpoints.sources import bare
from keyquery.instruments.ablation.ablate import facts_of
from keyquery.instruments.ablation.losses import default_loss, hide, logits, losses_of, real_tokens
from keyquery.intervene.dial.dial import Dial, dial
from keyquery.intervene.dial.means import Means
from keyquery.intervene.rewrites import sites_of
from keyquery.intervene.selection import Selection
from keyquery.listening import Batch
from keyquery.listening.hooks import evaluating
from keyquery.reading import Reading, digests, provenance
from keyquery.support.progress import Progress, silent
from keyquery.support.statistics import paired

first = itemgetter(0)
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
    """Run a language model on `batches` unchanged and with `gains` on parts of some heads; means are of the batches.

    With `directions`, single directions of these heads are scaled by `gain` instead, as in `kq.dial`. A decoder
    continues prompts by greedy decoding, an encoder predicts masked tokens by argmax.
    """
    model = bare(model)
    objective, loss = default_loss(model, tokenizer)
    changed, kind, gains = _dialling(model, batches, gains, heads, means, (directions, of, gain, on))
    watching, count = progress or silent, len(batches)
    before = losses_of(model, watching(batches, "running the model", count), loss)
    outputs = _outputs(model, batches, tokenizer, objective, samples)
    with changed():
        after = losses_of(model, watching(batches, "running it dialled", count), loss)
        dialled_outputs = _outputs(model, batches, tokenizer, objective, samples)
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
        samples=[
            {**original, "turned": dialled["says"]} for original, dialled in zip(outputs, dialled_outputs, strict=True)
        ],
        provenance=provenance(tensors=digests(model.state_dict()), means=kind),
    )


def _dialling(
    model: nn.Module,
    batches: Sequence[Batch],
    gains: Mapping[str, float],
    heads: Selection,
    means: str | None,
    options: tuple[Sequence[int], str, float, str],
) -> tuple[Callable[[], Dial], str | None, Mapping[str, float]]:
    """What dials the model, the kind of its means, and the gains to report."""
    numbers, of, gain, on = options
    if not numbers:
        measured = Means(model, batches, means)
        placed = measured.kind == "position" or any(site.placed for site in sites_of(model).values())
        if not placed and any(gains.get(part, 1) != 1 for part in ("position", "query_only")):
            raise ValueError("this model has no positional term in its scores: gains on it have no effect")
        return partial(dial, model, **dict(gains), heads=heads, data=measured), measured.kind, gains  # type: ignore[arg-type]
    if not isinstance(heads, str):
        raise ValueError("directions are those of single heads: name them, such as 18.6")
    about = Means(model, batches, means) if on == "data" else None
    options_of: Any = {"directions": dict.fromkeys(heads.split(","), numbers), "of": of, "gain": gain, "on": on}
    changed = partial(dial, model, **dict(gains), data=about, **options_of)  # type: ignore[arg-type]
    return changed, None if about is None else about.kind, {f"{of} direction {number}": gain for number in numbers}


def _outputs(
    model: nn.Module, batches: Sequence[Batch], tokenizer: Any, objective: str, samples: int
) -> list[dict[str, str]]:
    """The model's output for the first sequences."""
    with evaluating(model):
        rows = [
            {name: tensor[row : row + 1] for name, tensor in batch.items()}
            for batch in batches
            for row in range(len(batch["input_ids"]))
        ]
        generate = _continue if objective == "next token" else _fill_in
        return [generate(model, row, tokenizer) for row in rows[:samples]]


def _continue(model: nn.Module, row: Batch, tokenizer: Any) -> dict[str, str]:
    """Greedy continuation of a prompt."""
    ids = row["input_ids"][real_tokens(row)][:PROMPT]
    count = len(ids)
    for _ in range(ANSWER):
        ids = torch.cat((ids, logits(model, {"input_ids": ids[None]})[0, -1].argmax().cpu()[None]))
    return {"text": tokenizer.decode(ids[:count].tolist()), "says": tokenizer.decode(ids[count:].tolist())}


def _fill_in(model: nn.Module, row: Batch, tokenizer: Any) -> dict[str, str]:
    """A sequence with masked tokens, and the tokens that the model predicts there."""
    mask = tokenizer.mask_token_id
    hidden = hide(row, set(getattr(tokenizer, "all_special_ids", [])) | {mask})
    masked = {**row, "input_ids": row["input_ids"].masked_fill(hidden, mask)}
    filled = logits(model, masked)[0].argmax(-1).cpu()[hidden[0]]
    words = [tokenizer.decode([number]).strip() for number in filled.tolist()]
    seen, text = real_tokens(row)[0], ""
    pairs = zip(hidden[0, seen].tolist(), row["input_ids"][0, seen].tolist(), strict=True)
    for masked_run, run in groupby(pairs, first):
        numbers = [number for _, number in run]
        text += " ___" * len(numbers) if masked_run else tokenizer.decode(numbers)
    return {"text": text, "says": ", ".join(words)}
