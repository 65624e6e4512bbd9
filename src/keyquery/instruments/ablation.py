"""`ablate`: what a model loses with every part of every head, so that a verdict is a measurement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.capture import Batch
from keyquery.capture.watch import evaluating
from keyquery.checkpoints import read
from keyquery.checkpoints.sources import bare
from keyquery.forms.checks import check_choice
from keyquery.instruments.geometry import Look
from keyquery.instruments.intervals import paired
from keyquery.instruments.losses import Loss, next_token_loss
from keyquery.progress import Progress, silent
from keyquery.reading import Reading, digests, provenance
from keyquery.surgery.attach import sites_of
from keyquery.surgery.dial import PARTS, Means, dial
from keyquery.surgery.selection import Selection, select


@dataclass(frozen=True, kw_only=True)
class Ablation(Reading, kind="ablation"):
    """The change of the loss for every part turned off, head by head, layer by layer, or in all heads at once.

    `low` and `high` are the ends of a 95 % interval over sequences, each compared with itself; intervals are those of
    single comparisons, not of all at once.
    """

    units: ClassVar[Mapping[str, str]] = {"change": "loss with the part off, less the loss as it is"}

    model: Mapping[str, Any]
    loss: float
    sequences: int
    by: str
    rows: Sequence[Mapping[str, Any]]

    def records(self) -> list[dict[str, Any]]:
        """One row a head (or layer) and part."""
        return [dict(row) for row in self.rows]

    def onto(self, look: Look) -> Look:
        """The look with every head's changes beside its verdict, as its page shows them."""
        if self.by != "head":
            raise ValueError(f"only an ablation by head goes onto a look, this one is by {self.by}")
        changes: dict[tuple[int, int], dict[str, list[float]]] = {}
        for row in self.rows:
            cell = changes.setdefault((row["layer"], row["head"]), {})
            cell[row["part"]] = [row["change"], row["low"], row["high"]]
        known = {(head["layer"], head["head"]) for head in look.heads}
        if not set(changes) <= known:
            raise ValueError(f"the look has no head {min(set(changes) - known)}: it is of another model")
        heads = [
            {**head, "ablation": changes[at]} if (at := (head["layer"], head["head"])) in changes else head
            for head in look.heads
        ]
        return replace(look, heads=heads)


def ablate(
    model: nn.Module,
    data: Iterable[Batch],
    loss: Loss = next_token_loss,
    *,
    heads: Selection = None,
    by: str = "head",
    parts: Sequence[str] = PARTS,
    name: str | None = None,
    progress: Progress | None = None,
) -> Ablation:
    """Turn off each part of each head (`by` "head", "layer" or "all"), and say what the loss becomes.

    `loss(model, batch)` gives one loss a sequence, so that each is compared with itself. Means q̄ and k̄ are those of
    `data`. Parts that a model's scores do not have, such as position without rotations or biases, are left out.

    >>> from keyquery.layers import LanguageModel
    >>> model = LanguageModel.load(kq.models.DECODER)
    >>> batch = {"input_ids": torch.arange(60).reshape(4, 15) + 300}
    >>> found = kq.ablate(model, [batch], heads="0.*", by="layer")
    >>> [row["part"] for row in found.rows]
    ['reciprocal', 'directional', 'popularity']
    """
    model = bare(model)
    check_choice("by", by, ("head", "layer", "all"))
    for part in (parts := [parts] if isinstance(parts, str) else parts):
        check_choice("parts", part, PARTS)
    batches = list(data)
    if not batches:
        raise ValueError("data must hold at least one batch, got none")
    sites = sites_of(model)
    known = {index: range(site.count) for index, site in sites.items()}
    chosen = select(heads, known)
    placed = any(
        site.turn.rope is not None or site.position in ("alibi", "scaled alibi", "t5") for site in sites.values()
    )
    parts = [part for part in parts if part != "position" or placed]
    means = Means(model, batches)
    before = losses_of(model, batches, loss)
    turns = [(group, part) for group in _groups(chosen, by) for part in parts]
    rows = []
    with dial(model, heads=heads, data=means) as turning:
        for (layer, head, some), part in (progress or silent)(turns, "turning parts off", len(turns)):
            turning.turn(some, **{part: 0.0})
            interval = paired(before, losses_of(model, batches, loss))
            place = {"layer": layer, "head": head, "part": part}
            rows.append({**place, "change": interval.change, "low": interval.low, "high": interval.high})
    return Ablation(
        model=facts_of(model, name),
        loss=float(before.mean()),
        sequences=len(before),
        by=by,
        rows=rows,
        provenance=provenance(
            tensors=digests(model.state_dict()),
        ),
    )


def _groups(chosen: Mapping[int, list[int]], by: str) -> Iterator[tuple[int | None, int | None, Any]]:
    """Layer, head, and the heads that are turned together."""
    if by == "all":
        yield None, None, None
    for layer, heads in chosen.items():
        if by == "layer":
            yield layer, None, [(layer, head) for head in heads]
        elif by == "head":
            yield from ((layer, head, (layer, head)) for head in heads)


def facts_of(model: nn.Module, name: str | None) -> dict[str, Any]:
    """What a reading says of a live model, under the name that it was given."""
    return {**read(model).model, **({"name": name} if name else {})}


def losses_of(model: nn.Module, batches: Sequence[Batch], loss: Loss) -> Float[Tensor, " sequences"]:
    """One loss a sequence."""
    with evaluating(model):
        found = [torch.as_tensor(loss(model, batch)).detach().double().cpu() for batch in batches]
    if any(losses.ndim != 1 for losses in found):
        raise ValueError(f"loss must give one number a sequence, (batch,), got {tuple(found[0].shape)}")
    return torch.cat(found)
