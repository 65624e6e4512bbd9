"""`ablate`: what changes of attention heads cost, estimated for all at once and measured where it matters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from keyquery.checkpoints.sources import bare
from keyquery.instruments.ablation.changes import Cell, Change, Trial
from keyquery.instruments.ablation.estimate import Estimates, NoGradient, estimate
from keyquery.instruments.ablation.losses import OUTPUT, Loss, Objective, default_loss
from keyquery.instruments.ablation.measure import Measurement
from keyquery.instruments.ablation.named import Changes, Made, names_of, uses_means
from keyquery.instruments.ablation.plan import CHECK, agreement, flags, plan
from keyquery.intervene.dial.means import MEANS, Means
from keyquery.intervene.rewrites import check_unchanged, sites_of
from keyquery.intervene.selection import Selection, select
from keyquery.intervene.sites import Site, labels_of
from keyquery.listening import Batch
from keyquery.listening.inputs.data import Data
from keyquery.listening.live import live_heads
from keyquery.listening.parts.on_data import SEQUENCES, rows_of
from keyquery.reading import Reading, digests, provenance
from keyquery.support.checks import check_choice, check_count, check_number
from keyquery.support.progress import Progress, silent
from keyquery.support.statistics import paired

BY = ("head", "layer", "all")
MEASURE = ("auto", "all", "none")
THRESHOLD = 0.003  # nats per token
SAMPLES = 4
BUDGET = 2 * CHECK


@dataclass(frozen=True, kw_only=True)
class Ablation(Reading, kind="ablation"):
    """The cost of each change of each head, of each layer, of all heads, or of named sets of heads.

    A row has the `change` of the loss with its 95 % interval over sequences (`low`, `high`), and its `evidence`:
    "measured", or "estimated" where it was not measured. `estimate` is the sum of `first` and `second`, with the
    interval `estimate_low`, `estimate_high`. Intervals are not corrected for multiple comparisons.
    """

    units: ClassVar[Mapping[str, str]] = {
        "change": "loss with the change minus the original loss",
        "estimate": "first + second, without a run of the changed model",
        "first": "gradient of the loss times the exact change of the head's output",
        "second": "half the expected square of the same for labels sampled from the model",
    }

    model: Mapping[str, Any]  # name and facts of the model
    loss: float  # original, nats per token
    sequences: int  # that were run
    by: str  # "head", "layer", "all" or "set"
    rows: Sequence[Mapping[str, Any]]  # one per change of a head, layer or set
    objective: str = "next token"  # what the loss is of
    unit: str = "nats per token"  # of costs
    threshold: float = THRESHOLD  # cost up to which the loss counts as kept
    check: Mapping[str, Any] | None = None  # how estimates agree with measurements of random cells of this model

    def records(self) -> list[dict[str, Any]]:
        """One row per head, layer or set, and change."""
        return [dict(row) for row in self.rows]

    def costs(self) -> dict[Cell, dict[str, list[float]]]:
        """Change, low and high of every change, by head; of an ablation by head."""
        if self.by != "head":
            raise ValueError(f"only an ablation by head has costs of heads, this one is by {self.by}")
        heads: dict[Cell, dict[str, list[float]]] = {}
        for row in self.rows:
            if row["head"] is not None:
                cell = heads.setdefault((row["layer"], row["head"]), {})
                cell[row["part"]] = [row["change"], row["low"], row["high"]]
        return heads


def ablate(
    model: nn.Module,
    data: Iterable[Batch] | None = None,
    loss: Loss | None = None,
    *,
    text: str | Path | None = None,
    tokenizer: Any = None,
    changes: Changes = "parts",
    heads: Selection = None,
    by: str | Mapping[str, Selection] = "head",
    measure: str = "auto",
    budget: int = BUDGET,
    threshold: float = THRESHOLD,
    samples: int = SAMPLES,
    means: Means | str | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Ablation:
    """What would it cost? The change of the loss with each part of each head's scores left out, or other changes.

    All costs are estimated from 1 + K backward passes: with dz the exact change of a head's output and g the gradient
    of the loss, Σ g·dz + ½ E(Σ g̃·dz)², g̃ for labels sampled from the model. The costs that matter are then measured.

    Parameters
    ----------
    model
        A live model. It is given back as it was.
    data
        Batches for the model; the means that separate the parts are computed on them. Default: `text`.
    loss
        An `Objective`, such as `next_token_loss`, or a function `loss(model, batch)` that returns one loss per
        sequence, for which estimates have the first term alone. Default: next token for causal models, masked tokens
        with a tokenizer that has a mask, else the squared change of the output.
    text, tokenizer
        Path of a text, and the tokenizer that cuts it into windows of 128 tokens. Default: none.
    changes
        Names, or functions of a `Call` that return the new output of all its heads: "parts" (each of the five left
        out), "only" (each alone), "needs" (every set of parts alone, and the head off), a single one of them such as
        "skew" or "only position + query_only", "zero", "mean" (over `data`), "uniform", "window 16",
        "window 16 + first", "skew direction 0", "skew directions 8" ("singular", "symmetric"; "... on data"),
        "form symmetric" ("psd", "skew", "split", "rank 8"), "keys 4" ("values", 2, 3, 4 or 8 bits; "keys 4 per channel
        rotated mean apart"). Default: "parts".
    heads
        As in `kq.dial`. Default: all.
    by
        What changes together: "head" (keys and values: key head), "layer", "all", or sets of heads by name, such as
        `{"induction": ["18.6", "20.1"]}`. Default: "head".
    measure
        "auto" also measures 24 random cells, to check the estimates on this model, and those that are flagged or whose
        interval contains the threshold, within the budget; "all"; "none". Default: "auto".
    budget
        Most cells that "auto" measures. Default: 48.
    threshold
        Cost up to which a change counts as free. Default: 0.003 nats per token.
    samples
        K, draws of labels for the second term. Default: 4.
    means
        "position" or "global", as in `kq.dial`, or `Means` of other data. Default: "position" with at least 32
        sequences, else "global".
    name
        Name of the model. Default: that in its config.
    progress
        Wraps iterables in progress bars. Default: none.

    Returns
    -------
    Ablation
        The cost of each change with its 95 % interval and evidence.

    Examples
    --------
    >>> from keyquery.layers import LanguageModel
    >>> model = LanguageModel.load(kq.models.DECODER)
    >>> batch = {"input_ids": torch.arange(480).reshape(32, 15) + 300}
    >>> ablation = kq.ablate(model, [batch], heads="0.*", by="layer", changes=["symmetric", "uniform"])
    >>> [(row["part"], row["evidence"]) for row in ablation.rows]
    [('symmetric', 'measured'), ('uniform', 'measured')]
    >>> quick = kq.ablate(model, [batch], changes="keys 4", measure="none")
    >>> len(quick.rows), quick.rows[0]["evidence"], quick.rows[0]["estimate"] == quick.rows[0]["change"]
    (16, 'estimated', True)
    """
    model = bare(model)
    check_choice("measure", measure, MEASURE)
    check_count("budget", budget, least=0)
    check_count("samples", samples, least=1)
    check_number("threshold", threshold)
    batches, loss = _data(model, data, loss, text, tokenizer, progress or silent)
    sites = sites_of(model, batches[0])
    trials, about = _trials(model, batches, sites, changes, heads, by, means)
    by_site = {} if about is None else {index: about.of(site) for index, site in sites.items()}
    estimates, watched = None, (progress or silent)(batches, "estimating", len(batches))
    try:
        estimates = estimate(model, watched, loss, trials, sites, by_site, samples)
    except NoGradient:
        if measure != "all":
            raise
    rows = [_row(trial, estimates) for trial in trials]
    checked, further = plan(rows, measure, budget, threshold)
    numbers = sorted(checked + further)
    base = None if estimates is None else estimates.losses
    if numbers:
        runs = Measurement(model, batches, loss, sites, by_site)
        base = runs.before
        losses = runs.losses([trials[number] for number in numbers], progress)
        for number, after in zip(numbers, losses, strict=True):
            rows[number] |= {**paired(base, after)._asdict(), "evidence": "measured"}
    assert base is not None
    return Ablation(
        model=facts_of(model, name),
        loss=0.0 if loss is OUTPUT else float(base.mean()),
        sequences=len(base),
        by=by if isinstance(by, str) else "set",
        rows=rows,
        objective=loss.name if isinstance(loss, Objective) else "own",
        unit=loss.units if isinstance(loss, Objective) else "of the loss",
        threshold=threshold,
        check=None if estimates is None else agreement([rows[number] for number in checked]),
        provenance=provenance(tensors=digests(model.state_dict()), samples=samples),
    )


def _data(
    model: nn.Module, data: Any, loss: Loss | None, text: Any, tokenizer: Any, progress: Progress
) -> tuple[list[Batch], Loss]:
    """The batches of a model, and its loss."""
    if data is None and text is None:
        raise ValueError("pass data, batches for the model, or text with a tokenizer")
    prepared = Data(text=text, inputs=data, tokenizer=tokenizer).load(model, progress)
    batches = prepared.batches
    causal = live_heads(model, batches[0])[0].causal
    check_unchanged(model)
    if (count := sum(map(rows_of, batches))) == 1:
        raise ValueError(f"the cost of a change has an interval over sequences and needs at least 2, got {count}")
    if loss is not None:
        return batches, loss
    if not causal and getattr(prepared.tokenizer, "mask_token_id", None) is None:
        return batches, OUTPUT
    return batches, default_loss(model, prepared.tokenizer)


def _trials(
    model: nn.Module,
    batches: list[Batch],
    sites: Mapping[int, Site],
    changes: Changes,
    heads: Selection,
    by: str | Mapping[str, Selection],
    means: Means | str | None,
) -> tuple[list[Trial], Means | None]:
    """What is estimated and measured, all arguments checked, and the means of data that changes need."""
    known, labels = {index: range(site.count) for index, site in sites.items()}, labels_of(sites)
    groups: str | dict[str, dict[int, list[int]]]
    if isinstance(by, str):
        check_choice("by", by, BY)
        chosen, groups = select(heads, known, labels), by
    else:
        chosen, groups = select(None, known), {name: select(members, known, labels) for name, members in by.items()}
    if isinstance(means, str):
        check_choice("means", means, MEANS)
    count = sum(map(rows_of, batches))
    kind = means.kind if isinstance(means, Means) else means or ("position" if count >= SEQUENCES else "global")
    named = names_of(changes, placed=any(site.placed for site in sites.values()) or kind == "position")
    if means == "position" and count < SEQUENCES and (name := next(filter(uses_means, named), None)):
        raise ValueError(f"{name!r} is about means by position, which need {SEQUENCES} sequences, got {count}")
    about = cache(lambda: means if isinstance(means, Means) else Means(model, batches, means))
    made = Made(model, batches, sites, chosen, about)
    ready = [change or made.change(name) for name, change in named.items()]
    rows = [
        (number, Trial(change, members, {**names, "part": change.name}))
        for change in ready
        for number, (names, members) in enumerate(_units(groups, chosen, sites, change))
    ]
    rows.sort(key=itemgetter(0))  # all changes of a head, then those of the next
    return [trial for _, trial in rows], about() if any(change.needs_means for change in ready) else None


def _units(
    by: str | Mapping[str, Mapping[int, list[int]]],
    chosen: Mapping[int, list[int]],
    sites: Mapping[int, Site],
    change: Change,
) -> Iterator[tuple[dict[str, Any], Mapping[int, list[int]]]]:
    """The names of each row of a change, and the heads that change together."""
    if not isinstance(by, str):
        yield from (({"layer": None, "head": None, "set": name}, members) for name, members in by.items())
        return
    if by == "all":
        yield {"layer": None, "head": None}, chosen
        return
    for layer, heads in chosen.items():
        if by == "layer":
            yield {"layer": layer, "head": None}, {layer: heads}
        elif not change.per_key_head:
            yield from (({"layer": layer, "head": head}, {layer: [head]}) for head in heads)
        else:
            shared = sites[layer].count // sites[layer].key_heads
            for key_head in sorted({head // shared for head in heads}):
                group = list(range(key_head * shared, (key_head + 1) * shared))
                yield {"layer": layer, "head": None, "key_head": key_head}, {layer: group}


def _row(trial: Trial, estimates: Estimates | None) -> dict[str, Any]:
    """The row of a trial, from its estimate."""
    row = {**trial.names, **(trial.change.facts.get(trial.cells[0], {}) if len(trial.cells) == 1 else {})}
    if estimates is None:
        return row
    first, second = estimates.of(trial)
    change, low, high = paired(torch.zeros_like(first), first + second)
    return row | {
        **{"change": change, "low": low, "high": high, "evidence": "estimated"},
        **{"estimate": change, "estimate_low": low, "estimate_high": high},
        **{"first": float(first.mean()), "second": float(second.mean()), "flags": flags(first + second)},
    }


def facts_of(model: nn.Module, name: str | None) -> dict[str, Any]:
    """Facts of a live model for a reading, with an optional name."""
    return {**live_heads(model).model, **({"name": name} if name else {})}
