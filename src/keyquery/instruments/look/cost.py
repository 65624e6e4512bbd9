"""The costs of parts that a look computes on its text, which say what each head needs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from keyquery.checkpoints import Heads
from keyquery.instruments.ablation.ablate import Ablation, ablate
from keyquery.instruments.ablation.losses import default_loss, logits
from keyquery.intervene.rewrites import sites_of
from keyquery.listening import Batch, typical_length
from keyquery.listening.hooks import evaluating
from keyquery.listening.inputs.batches import LENGTH
from keyquery.listening.inputs.data import Prepared
from keyquery.listening.parts.on_data import rows_of
from keyquery.support.progress import Progress

SEQUENCES = 32, 96  # that costs are estimated on: at least, as means by position need, and at most
WORK = 6e11  # weights × tokens, about half a minute of passes on two CPU cores


def estimated_costs(
    prepared: Prepared, batches: Sequence[Batch], heads: Heads, layers: Sequence[int], progress: Progress
) -> Ablation:
    """The estimated cost of every set of parts of the heads of some layers; ValueError if the model has no loss."""
    model = prepared.model
    size = sum(weight.numel() for weight in model.parameters()) * (typical_length(list(batches)) or LENGTH)
    some = _first(batches, min(max(int(WORK / max(size, 1)), SEQUENCES[0]), SEQUENCES[1]))
    _, loss = default_loss(model, prepared.tokenizer)
    with evaluating(model):
        logits(model, {name: x[:1] if isinstance(x, Tensor) else x for name, x in some[0].items()})
    chosen = [
        (index, head)
        for index, site in sites_of(model, some[0]).items()
        if index in layers
        for head in range(site.count)
    ]
    if not chosen:
        raise ValueError("none of these layers can be changed")
    means = "position" if sum(map(rows_of, some)) >= SEQUENCES[0] else "global"
    return ablate(model, some, loss, changes="needs", heads=chosen, measure="none", means=means, progress=progress)


def _first(batches: Sequence[Batch], count: int) -> list[Batch]:
    """The first sequences of batches."""
    kept: list[Batch] = []
    for batch in batches:
        rows = min(rows_of(batch), count)
        if rows:
            kept.append({name: x[:rows] if isinstance(x, Tensor) else x for name, x in batch.items()})
        count -= rows
    return kept
