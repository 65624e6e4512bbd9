"""What a look runs a model for: metrics of its scores on data, roles, and estimated costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from keyquery.checkpoints import Heads
from keyquery.instruments.ablation.ablate import THRESHOLD, Ablation, ablate
from keyquery.instruments.ablation.losses import default_loss, logits
from keyquery.instruments.look.on_data import OnData
from keyquery.instruments.look.sample import take
from keyquery.instruments.roles.run import SEQUENCES, Options, run
from keyquery.intervene.rewrites import check_unchanged, sites_of
from keyquery.listening import Batch, typical_length
from keyquery.listening.hooks import evaluating
from keyquery.listening.inputs.batches import LENGTH, SIZE
from keyquery.listening.inputs.data import Data, Prepared
from keyquery.listening.parts.on_data import rows_of
from keyquery.support.checks import check_count, check_number
from keyquery.support.printable import first_line
from keyquery.support.progress import Progress

COST_SEQUENCES = 32, 96  # that costs are estimated on: at least, as means by position need, and at most
COST_WORK = 6e11  # weights × tokens, about half a minute of passes on two CPU cores


@dataclass(frozen=True)
class RunResult:
    """What came of running a model: metrics on data, roles by layer and head, costs, and facts for provenance."""

    on_data: OnData = field(default_factory=OnData)
    roles: Mapping[tuple[int, int], dict[str, Any]] | None = None
    costs: Ablation | None = None
    facts: Mapping[str, Any] = field(default_factory=lambda: {"data": None})


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

    def prepare(self, source: Any, watching: Progress, adapter: str | Path | None) -> Prepared | None:
        """The model, with its LoRA adapter, and its batches, none of which has run; None if nothing needs a run."""
        if self.text is None and self.inputs is None and not self.roles:
            return None
        return self.load(source, watching, adapter, lm_head=self.roles or self._costs)

    def run(self, prepared: Prepared | None, heads: Heads, layers: Sequence[int], watching: Progress) -> RunResult:
        """All that was asked for; costs are those of some `layers`."""
        if prepared is None:
            return RunResult()
        on_data = OnData()
        if prepared.batches:
            sample = take(prepared.model, prepared.batches, heads, self.sample, prepared.tokenizer)
            on_data = OnData.of(prepared, self.length, heads, sample, watching)
        roles, facts = self._measured_roles(prepared, heads, watching) if self.roles else (None, {})
        costs = None
        if self._costs:
            try:
                costs = estimated_costs(prepared, heads, layers, self.threshold, watching)
            except (NotImplementedError, ValueError) as error:
                if self.cost:
                    raise
                facts |= {"costs": {"note": f"no costs: {first_line(error)}"}}
        return RunResult(on_data, roles, costs, {"data": on_data.facts, **facts})

    def _measured_roles(
        self, prepared: Prepared, heads: Heads, watching: Progress
    ) -> tuple[dict[tuple[int, int], dict[str, Any]], dict[str, Any]]:
        """Roles on as many sequences of the data as of random tokens, and facts about them."""
        check_unchanged(prepared.model)
        batches = prepared.batches[: -(-SEQUENCES // SIZE)]
        data = {"inputs" if self.text is None else "text": batches} if batches else {}
        options = Options(length=self.length)
        rows, facts, notes = run(prepared.model, heads, prepared.tokenizer, data, options, watching)
        roles = {(row["layer"], row["head"]): {key: row[key] for key in ("role", "roles", "scores")} for row in rows}
        return roles, {"roles": {**facts, "notes": notes}}


def estimated_costs(
    prepared: Prepared, heads: Heads, layers: Sequence[int], threshold: float, progress: Progress
) -> Ablation:
    """The estimated cost of every set of parts of the heads of some layers; ValueError if the model has no loss."""
    model, batches = prepared.model, prepared.batches
    size = sum(weight.numel() for weight in model.parameters()) * (typical_length(batches) or LENGTH)
    some = _first(batches, min(max(int(COST_WORK / max(size, 1)), COST_SEQUENCES[0]), COST_SEQUENCES[1]))
    _, loss = default_loss(model, prepared.tokenizer)
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
