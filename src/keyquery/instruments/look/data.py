"""What a look runs a model for: shares of the variance of its scores, a sample of these, roles, and estimated costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.forms.parts import PARTS, score_parts
from keyquery.instruments.ablation.ablate import THRESHOLD, Ablation, ablate
from keyquery.instruments.ablation.losses import default_loss, logits
from keyquery.instruments.roles.run import SEQUENCES as ROLE_SEQUENCES
from keyquery.instruments.roles.run import Options, run
from keyquery.intervene.rewrites import check_unchanged, sites_of
from keyquery.listening import Batch, queries_and_keys, typical_length
from keyquery.listening.hooks import evaluating
from keyquery.listening.inputs.batches import LENGTH, SIZE, without_padding
from keyquery.listening.inputs.data import Data, Prepared
from keyquery.listening.inputs.word_pieces import token_text
from keyquery.listening.parts.means import PositionMeans
from keyquery.listening.parts.on_data import SEQUENCES, rows_of, score_variances
from keyquery.listening.parts.shares import Estimate, score_shares
from keyquery.listening.parts.variance import ScoreVariance, add_term
from keyquery.reading import short
from keyquery.support.checks import check_count, check_number
from keyquery.support.printable import first_line
from keyquery.support.progress import Progress
from keyquery.support.statistics import student

COST_SEQUENCES = 32, 96  # that costs are estimated on: at least, as means by position need, and at most
COST_WORK = 6e11  # weights × tokens, about half a minute of passes on two CPU cores
SHARES = (*PARTS, "interaction", "symmetry")
CROSS = ("popularity", "query_only", "position", "interaction", "sink")  # of cross-attention, besides "pairwise"
SQUARES = (*PARTS, "pairwise", "sink")
DIGITS = 4  # significant digits kept of a score of the sample


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


@dataclass(frozen=True)
class OnData:
    """What running the model gave; nothing without data."""

    sums: Mapping[int, ScoreVariance] = field(default_factory=dict)  # by layer
    sample: Sample | None = None
    roles: Mapping[tuple[int, int], dict[str, Any]] = field(default_factory=dict)  # by layer and head
    costs: Ablation | None = None
    facts: Mapping[str, Any] = field(default_factory=lambda: {"data": None})  # for provenance

    def of_layer(self, layer: Layer, heads: Heads) -> list[dict[str, Any]]:
        """Metrics of every head of a layer, None without data, and its scores on the sample and roles, if any."""
        sums = self.sums.get(layer.index)
        rows = [None] * layer.heads if sums is None else _metrics(sums)
        cells: list[dict[str, Any]] = [{"on_data": row} for row in rows]
        if sums is not None and self.sample is not None and layer.index in self.sample.projected:
            scores = self.sample.scores(layer, heads, sums.means, sums.by_position)
            for cell, of_head in zip(cells, scores, strict=True):
                cell["scores"] = of_head
        for head, cell in enumerate(cells if self.roles else []):
            cell["roles"] = self.roles[layer.index, head]
        return cells


@dataclass(frozen=True, kw_only=True)
class LookData(Data):
    """The arguments of `look` that concern data; checked when created, before a model is built."""

    sample: int = 0
    roles: bool = False
    cost: bool | None = None  # None: with text, where the model has a loss
    threshold: float = THRESHOLD

    def __post_init__(self) -> None:
        without_data = self.text is None and self.inputs is None
        if self.dtype is not None and without_data and not self.roles:
            raise ValueError("dtype is that of the model that runs: pass text, inputs or roles as well")
        if self.cost and without_data:
            raise ValueError("costs are changes of the loss on data: pass text or inputs as well")
        check_count("sample", self.sample, least=0)
        check_number("threshold", self.threshold)
        super().__post_init__()

    @property
    def _costs(self) -> bool:
        return self.text is not None if self.cost is None else self.cost

    def prepare(self, source: Any, progress: Progress, adapter: str | Path | None) -> Prepared | None:
        """The model, with its LoRA adapter, and its batches, none of which has run; None if nothing needs a run."""
        if self.text is None and self.inputs is None and not self.roles:
            return None
        return self.load(source, progress, adapter, lm_head=self.roles or self._costs)

    def run(self, prepared: Prepared | None, heads: Heads, layers: Sequence[int], progress: Progress) -> OnData:
        """All that was asked for; costs are those of some `layers`."""
        if prepared is None:
            return OnData()
        sums: dict[int, ScoreVariance] = {}
        roles: dict[tuple[int, int], dict[str, Any]] = {}
        facts: dict[str, Any] = {"data": None}
        sample = costs = None
        if batches := prepared.batches:
            if not any(layer.kind == "self" for layer in heads):
                problem = "only self-attention is analysed on data, and this model has none"
                raise ValueError(f"{problem}: omit text and inputs")
            sample = take(prepared.model, batches, heads, self.sample, prepared.tokenizer)
            sums = score_variances(
                prepared.model, batches, heads, lambda order: progress(order, "running the model", len(order))
            )
            facts["data"] = _described(sums, prepared, self.length)
        if self.roles:
            roles, facts["roles"] = self._measured_roles(prepared, heads, progress)
        if self._costs:
            try:
                costs = estimated_costs(prepared, heads, layers, self.threshold, progress)
            except (NotImplementedError, ValueError) as error:
                if self.cost:
                    raise
                facts["costs"] = {"note": f"no costs: {first_line(error)}"}
        return OnData(sums, sample, roles, costs, facts)

    def _measured_roles(
        self, prepared: Prepared, heads: Heads, progress: Progress
    ) -> tuple[dict[tuple[int, int], dict[str, Any]], dict[str, Any]]:
        """Roles on as many sequences of the data as of random tokens, and facts about them."""
        check_unchanged(prepared.model)
        batches = prepared.batches[: -(-ROLE_SEQUENCES // SIZE)]
        data = {"inputs" if self.text is None else "text": batches} if batches else {}
        options = Options(length=self.length)
        rows, facts, notes = run(prepared.model, heads, prepared.tokenizer, data, options, progress)
        roles = {(row["layer"], row["head"]): {key: row[key] for key in ("role", "roles", "scores")} for row in rows}
        return roles, {**facts, "notes": notes}


def estimated_costs(
    prepared: Prepared, heads: Heads, layers: Sequence[int], threshold: float, progress: Progress
) -> Ablation:
    """The estimated cost of every set of parts of the heads of some layers; ValueError if the model has no loss."""
    model, batches = prepared.model, prepared.batches
    size = sum(weight.numel() for weight in model.parameters()) * (typical_length(batches) or LENGTH)
    some = _first(batches, min(max(int(COST_WORK / max(size, 1)), COST_SEQUENCES[0]), COST_SEQUENCES[1]))
    loss = default_loss(model, prepared.tokenizer)
    with evaluating(model):
        logits(model, _first(some, 1)[0])
    sites = {index: site for index, site in sites_of(model, some[0]).items() if index in layers}
    chosen = [(index, head) for index, site in sites.items() for head in range(site.count)]
    if not chosen:
        raise ValueError("none of these layers can be changed")
    means = "position" if sum(map(rows_of, some)) >= COST_SEQUENCES[0] else "global"
    options: dict[str, Any] = {"changes": "needs", "measure": "none", "means": means, "threshold": threshold}
    return ablate(model, some, loss, heads=chosen, progress=progress, **options)


def _first(batches: Sequence[Batch], count: int) -> list[Batch]:
    """The first sequences of batches."""
    kept: list[Batch] = []
    for batch in batches:
        rows = min(rows_of(batch), count)
        if rows:
            kept.append({name: x[:rows] if isinstance(x, Tensor) else x for name, x in batch.items()})
        count -= rows
    return kept


def _described(sums: Mapping[int, ScoreVariance], prepared: Prepared, longest: int) -> dict[str, Any]:
    """The data that shares are measured on, in windows of at most `longest` tokens, with notes on their limits."""
    # Sequences are often much shorter than the longest window; inputs are not cut, and may be longer.
    typical = typical_length(prepared.batches)
    if typical is None:  # images, sounds and inputs of other names
        typical = longest = max(of_layer.longest for of_layer in sums.values())
    first, sequences = next(iter(sums.values())), sum(map(rows_of, prepared.batches))
    notes = []
    if not first.by_position:
        notes.append(
            f"{sequences} sequences are too few for means by position, which need {SEQUENCES}: means are "
            "over all positions, and learned positions count as popularity"
        )
    if first.left_out:
        share = first.left_out / (first.left_out + first.pairs)
        notes.append(f"{share:.0%} of the visible pairs are excluded: too few sequences reach their positions")
    return {
        "tokens": int(first.tokens.sum()),
        "sequences": sequences,
        "length": typical,
        "longest": max(longest, typical),
        "from": prepared.origin,
        "means": "by position" if first.by_position else "over all positions",
        **({"note": "; ".join(notes)} if notes else {}),
    }


def _metrics(sums: ScoreVariance) -> list[dict[str, Any]]:
    """Metrics of each head; two sequences have a pairwise part in place of symmetric and skew."""
    shares = score_shares(sums)
    estimates = shares.estimates
    if sums.is_cross:
        estimates = {"pairwise": estimates["symmetric"], **{name: estimates[name] for name in CROSS}}
    rows: list[dict[str, Any]] = []
    for head in range(len(estimates["sink"].value)):
        values = {name: float(estimate.value[head]) for name, estimate in estimates.items()}
        row: dict[str, Any] = {
            "intervals": {
                name: interval(estimate, head, square=name in SQUARES) for name, estimate in estimates.items()
            },
            "interactions": {name: float(value[head]) for name, value in shares.interactions.items()},
        }
        if sums.is_cross:
            pairs = row["interactions"].items()
            row["interactions"] = {
                name.replace("symmetric", "pairwise"): value for name, value in pairs if "skew" not in name
            }
        else:
            values.pop("pairwise")
            row["half_window"] = {name: float(shares.half[name].value[head]) for name in SHARES}
            changes = values["symmetry"] * row["half_window"]["symmetry"] < 0
            row["changes_with_window"] = ["symmetry"] if changes else []
        rows.append({**values, **row})
    return rows


def interval(estimate: Estimate, head: int, square: bool = False) -> list[float] | None:
    """The 95 % interval of one head's estimate, of a `square` by its logarithm; None with too few sequences."""
    value, error, freedom = (float(number[head]) for number in estimate)
    if not math.isfinite(error) or freedom < 1:
        return None
    half = student(int(freedom + 1e-6)) * error  # n − 1 may be rounded down to less
    if square and half < value / 2:  # not close to 0: the error of a sum of squares grows with it
        return [value * math.exp(-half / value), value * math.exp(half / value)]
    return [value - half, value + half]


def take(model: nn.Module, batches: Sequence[Batch], heads: Heads, count: int, tokenizer: Any = None) -> Sample | None:
    """Run the model on the first `count` tokens alone of the first sequence of at least two; None if there is none."""
    rows = ((batch, row) for batch in batches if "input_ids" in batch for row in range(len(batch["input_ids"])))
    whole = (without_padding(batch, row) for batch, row in rows) if count else iter(())
    batch = next((sequence for sequence in whole if sequence["input_ids"].shape[1] > 1), None)
    if batch is None:
        return None
    shape = batch["input_ids"].shape
    batch = {name: x[:, :count] if x.shape[:2] == shape else x for name, x in batch.items()}
    ids = batch["input_ids"][0].tolist()
    projected = {}
    for index, (query, key) in queries_and_keys(model, batch, heads).items():
        # A block shared by several layers has seen the tokens several times: keep the first.
        if query.shape[-2] % len(ids) == 0:
            projected[index] = (query[..., : len(ids), :], key[..., : len(ids), :])
    notes = _softmax_notes(heads.config, len(ids))
    facts = {"tokens": [token_text(number, tokenizer) for number in ids], **({"notes": notes} if notes else {})}
    return Sample(facts, projected)


def _softmax_notes(config: Mapping[str, Any], tokens: int) -> list[str]:
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
