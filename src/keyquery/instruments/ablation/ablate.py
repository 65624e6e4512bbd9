"""`ablate`: the change of the loss when parts of attention scores, or whole heads, are ablated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints.sources import bare
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.losses import Loss, next_token_loss
from keyquery.instruments.ablation.replay import Tape, from_block
from keyquery.instruments.ablation.trials import Trial, Trials
from keyquery.instruments.ablation.variants import losses_of
from keyquery.instruments.look.labels import Thresholds, label_head
from keyquery.instruments.look.reading import Look
from keyquery.intervene.dial.dial import dial
from keyquery.intervene.dial.means import Means
from keyquery.intervene.handle import Handle
from keyquery.intervene.head_output import KINDS, ablate_heads, mean_outputs
from keyquery.intervene.rewrites import sites_of
from keyquery.intervene.selection import Selection, select
from keyquery.intervene.sites import Site, labels_of
from keyquery.listening import Batch
from keyquery.listening.live import live_heads
from keyquery.reading import Reading, digests, provenance
from keyquery.support.checks import check_choice, check_count
from keyquery.support.progress import Progress, Runs, silent
from keyquery.support.statistics import paired

BY = ("head", "layer", "all", "direction")


@dataclass(frozen=True, kw_only=True)
class Ablation(Reading, kind="ablation"):
    """The change of the loss with each part ablated, per head, per layer, in all heads at once, or per direction.

    An ablation by direction has a row per direction, the costliest first, with its number, value and share. `low` and
    `high` bound a 95 % interval over sequences, paired by sequence; intervals are not corrected for multiple
    comparisons.
    """

    units: ClassVar[Mapping[str, str]] = {"change": "loss with the part ablated minus the original loss"}

    model: Mapping[str, Any]  # name and facts of the model
    loss: float  # original, nats per token
    sequences: int  # that were run
    by: str  # "head", "layer", "all" or "direction"
    rows: Sequence[Mapping[str, Any]]  # one per ablation: part, change, low, high

    def records(self) -> list[dict[str, Any]]:
        """One row per head (or layer) and part, or per direction."""
        return [dict(row) for row in self.rows]

    def onto(self, look: Look, thresholds: Thresholds | None = None) -> Look:
        """The look with the ablation of every head, and labels updated by it."""
        if self.by != "head":
            raise ValueError(f"only an ablation by head can be added to a look, this one is by {self.by}")
        changes: dict[tuple[int, int], dict[str, list[float]]] = {}
        for row in self.rows:
            cell = changes.setdefault((row["layer"], row["head"]), {})
            cell[row["part"]] = [row["change"], row["low"], row["high"]]
        known = {(head["layer"], head["head"]) for head in look.heads}
        if not set(changes) <= known:
            raise ValueError(f"the look has no head {min(set(changes) - known)}: it belongs to another model")
        heads = [
            _labelled(head, changes[at], thresholds) if (at := (head["layer"], head["head"])) in changes else head
            for head in look.heads
        ]
        return replace(look, heads=heads)


def _labelled(head: Mapping[str, Any], changes: dict[str, list[float]], limit: Thresholds | None) -> dict[str, Any]:
    """A head of a look with its ablation; relabelling needs the changes of all parts."""
    parts = {part: changes[part] for part in PARTS if part in changes}
    whole = head["on_data"] is not None and {"symmetric", "skew", "popularity"} <= set(parts)
    label = label_head(head["raw"], head["on_data"], parts, limit)._asdict() if whole else {}
    return {**head, "ablation": changes, **label}


def ablate(
    model: nn.Module,
    data: Iterable[Batch],
    loss: Loss = next_token_loss,
    *,
    heads: Selection = None,
    by: str = "head",
    parts: Sequence[str] = PARTS,
    means: str | None = None,
    directions: int = 8,
    of: str = "singular",
    on: str = "weights",
    name: str | None = None,
    progress: Progress | None = None,
) -> Ablation:
    """Ablate each part of each head's scores, and measure the change of the loss.

    change = loss with the part ablated − original loss, averaged over sequences.

    Parameters
    ----------
    model
        A live model with an LM head.
    data
        Batches for the model; the means that separate the parts are computed on them.
    loss
        `loss(model, batch)` returns one loss per sequence. Default: next-token cross-entropy, nats per token.
    heads
        As in `kq.dial`. Default: all.
    by
        What is ablated at a time: "head", "layer", "all", or "direction": single directions of each head. Default:
        "head".
    parts
        Parts of the scores; "zero" and "mean" ablate whole heads, whose output is replaced by 0 or by its mean over
        `data`. Default: the five parts; those absent from the model's scores are skipped.
    means
        "position" or "global", as in `kq.dial`. Default: "position" with at least 32 sequences, else "global".
    directions, of, on
        By direction: how many of each head, strongest first, of which matrix, and on weights or data, as in `kq.dial`.
        Default: 8 "singular" directions of the "weights".
    name
        Name of the model. Default: that in its config.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    Ablation
        The change of the loss with its 95 % interval, per group and part.

    Raises
    ------
    ValueError
        If `data` is empty, or `by`, `parts` or `heads` name something unknown.

    Examples
    --------
    >>> from keyquery.layers import LanguageModel
    >>> model = LanguageModel.load(kq.models.DECODER)
    >>> batch = {"input_ids": torch.arange(480).reshape(32, 15) + 300}
    >>> ablation = kq.ablate(model, [batch], heads="0.*", by="layer", parts=["symmetric", "skew"])
    >>> [row["part"] for row in ablation.rows]
    ['symmetric', 'skew']
    >>> ranked = kq.ablate(model, [batch], heads="0.1", by="direction", of="skew", directions=2)
    >>> sorted(row["direction"] for row in ranked.rows), ranked.rows[0]["change"] >= ranked.rows[1]["change"]
    ([0, 1], True)

    See Also
    --------
    dial : Scale parts of the scores instead.
    ablate_heads : Ablate whole heads in a running model.
    """
    model = bare(model)
    check_choice("by", by, BY)
    for part in (parts := [parts] if isinstance(parts, str) else parts):
        check_choice("parts", part, (*PARTS, *KINDS))
    batches = list(data)
    if not batches:
        raise ValueError("data must contain at least one batch, got none")
    sites = sites_of(model, batches[0])
    known = {index: range(site.count) for index, site in sites.items()}
    chosen = select(heads, known, labels_of(sites))
    if by == "direction":
        check_count("directions", directions)
        before, rows = _by_direction(model, batches, loss, chosen, (directions, of, on, means), progress or silent)
        return _reading(model, name, before, by, rows)
    measured = Means(model, batches, means)
    placed = measured.kind == "position" or any(site.placed for site in sites.values())
    parts = [part for part in parts if part not in ("position", "query_only") or placed]
    before = losses_of(model, batches, loss)
    trials = [Trial(*group, part) for group in _groups(chosen, by) for part in parts]
    outputs = mean_outputs(model, batches, {i: sites[i] for i in chosen}) if "mean" in parts else {}
    rows = []
    with dial(model, heads=heads, data=measured) as dialled:

        def whole(kind: str, own: Selection) -> Handle:
            return ablate_heads(model, kind, own or heads, means=outputs)

        runs = Trials(model, batches, loss, dialled, whole)
        watched = (progress or silent)(_runs(trials, batches), "ablating parts", len(trials))
        for layer, own in groupby(watched, key=lambda trial: trial.layer):
            dialled.turn()
            changed = sites if layer is None else {layer: sites[layer]}
            with below(model, sites.get(layer), batches, loss) as tape:
                for trial, losses in runs.losses(own, changed.values(), tape):
                    where = {"layer": layer, "head": trial.head, "part": trial.part}
                    rows.append({**where, **paired(before, losses)._asdict()})
    return _reading(model, name, before, by, rows)


def below(
    model: nn.Module, site: Site | None, batches: Sequence[Batch], loss: Loss
) -> AbstractContextManager[Tape | None]:
    """Context in which the layers below a site run no more, since they do not change."""
    if site is None:
        return nullcontext()
    return from_block(model, site.name.removesuffix(" (rope)"), lambda: losses_of(model, batches, loss))


def _reading(
    model: nn.Module, name: str | None, before: Tensor, by: str, rows: Sequence[Mapping[str, Any]]
) -> Ablation:
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


def _by_direction(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Loss,
    chosen: Mapping[int, list[int]],
    options: tuple[int, str, str, str | None],
    progress: Progress,
) -> tuple[Float[Tensor, " sequences"], list[dict[str, Any]]]:
    """The original loss per sequence, and a row per direction, the costliest first."""
    count, of, on, means = options
    data: Any = {"data": Means(model, batches, means)} if on == "data" else {}
    places = [(layer, head) for layer, heads in chosen.items() for head in heads]
    rows = []
    with dial(model, directions={place: [0] for place in places}, of=of, on=on, gain=1.0, **data) as dialled:
        before = losses_of(model, batches, loss)
        trials = [(at, number) for at in places for number in range(min(count, len(dialled.bases[at].values)))]
        sites = sites_of(model)
        watched = progress(_runs(trials, batches), "ablating directions", len(trials))
        for index, own in groupby(watched, key=lambda trial: trial[0][0]):
            dialled.turn_directions({})
            with below(model, sites[index], batches, loss):
                for (layer, head), number in own:
                    dialled.turn_directions({(layer, head): [number]})
                    interval = paired(before, losses_of(model, batches, loss))
                    basis = dialled.bases[layer, head]
                    where = {"layer": layer, "head": head, "part": of, "direction": number}
                    size = {"value": float(basis.values[number]), "share": float(basis.shares[number])}
                    rows.append({**where, **size, **interval._asdict()})
    return before, sorted(rows, key=lambda row: -row["change"])


def _runs(trials: Iterable[Any], batches: Sequence[Batch]) -> Runs:
    """Trials, each a run on all batches."""
    return Runs(trials, sum(batch["input_ids"].numel() for batch in batches if "input_ids" in batch))


def _groups(chosen: Mapping[int, list[int]], by: str) -> Iterator[tuple[int | None, int | None, Any]]:
    """Layer, head, and the heads that are ablated together."""
    if by == "all":
        yield None, None, None
    for layer, heads in chosen.items():
        if by == "layer":
            yield layer, None, [(layer, head) for head in heads]
        elif by == "head":
            yield from ((layer, head, (layer, head)) for head in heads)


def facts_of(model: nn.Module, name: str | None) -> dict[str, Any]:
    """Facts of a live model for a reading, with an optional name."""
    return {**live_heads(model).model, **({"name": name} if name else {})}
