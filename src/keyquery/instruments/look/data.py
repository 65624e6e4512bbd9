"""What a look runs a model for: metrics of its scores on data, and roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from keyquery.checkpoints import Heads
from keyquery.instruments.ablation.ablate import Ablation, ablate
from keyquery.instruments.ablation.losses import default_loss, logits
from keyquery.instruments.look.on_data import PAIRS, OnData
from keyquery.instruments.look.sample import Sample, take
from keyquery.instruments.roles.run import SEQUENCES, Options, run
from keyquery.intervene.rewrites import check_unchanged, sites_of
from keyquery.listening import Batch, typical_length
from keyquery.listening.hooks import evaluating
from keyquery.listening.inputs.batches import LENGTH, SIZE
from keyquery.listening.inputs.data import Data, Prepared
from keyquery.listening.parts.on_data import rows_of
from keyquery.support.checks import check_choice, check_count
from keyquery.support.printable import first_line
from keyquery.support.progress import Progress

COST_SEQUENCES = 32, 96  # that costs are estimated on: at least, as means by position need, and at most
COST_WORK = 6e11  # weights × tokens, about half a minute of passes on two CPU cores


@dataclass(frozen=True, kw_only=True)
class LookData(Data):
    """The arguments of `look` that concern data; checked when created, before a model is built."""

    pairs: str = PAIRS[0]
    sample: int = 0
    roles: bool = False
    cost: bool | None = None  # None: with text, where the model has a loss

    def __post_init__(self) -> None:
        if self.dtype is not None and self.text is None and self.inputs is None and not self.roles:
            raise ValueError("dtype is that of the model that runs: pass text, inputs or roles as well")
        if self.cost and self.text is None and self.inputs is None:
            raise ValueError("costs are changes of the loss on data: pass text or inputs as well")
        check_count("sample", self.sample, least=0)
        check_choice("pairs", self.pairs, PAIRS)
        super().__post_init__()

    def prepare(self, source: Any, watching: Progress, adapter: str | Path | None = None) -> Prepared | None:
        """The model, with its LoRA adapter, and its batches, none of which has run; None if nothing needs a run."""
        if self.text is None and self.inputs is None and not self.roles:
            return None
        return self.load(source, watching, adapter, lm_head=self.roles or self._costs)

    @property
    def _costs(self) -> bool:
        """Whether costs are wanted."""
        return self.text is not None if self.cost is None else self.cost

    def costs(
        self, prepared: Prepared | None, heads: Heads, layers: Sequence[int], watching: Progress
    ) -> tuple[Ablation | None, dict[str, Any]]:
        """The estimated costs, if they are wanted; and, where the model has none, why."""
        if prepared is None or not self._costs:
            return None, {}
        try:
            return estimated_costs(prepared, prepared.windows[self.length], heads, layers, watching), {}
        except (NotImplementedError, ValueError) as error:
            if self.cost:
                raise
            return None, {"costs": {"note": f"no costs: {first_line(error)}"}}

    def run(self, prepared: Prepared, heads: Heads, watching: Progress) -> RunResult:
        """Metrics on windows of `length`, with the sample, and on windows of each of `lengths`; and roles if wanted."""
        result = RunResult()
        if prepared.windows:
            sample = take(prepared.model, prepared.windows[self.length], heads, self.sample, prepared.tokenizer)
            on_data = self._measured(self.length, prepared, heads, watching, sample)
            lengths = {length: self._measured(length, prepared, heads, watching) for length in self.lengths or ()}
            result = RunResult(on_data, lengths)
        return self._with_roles(result, prepared, heads, watching) if self.roles else result

    def _measured(
        self, length: int, prepared: Prepared, heads: Heads, watching: Progress, sample: Sample | None = None
    ) -> OnData:
        described = {"longest": length, "from": prepared.origin, "pairs": self.pairs}
        return OnData.of(prepared.model, prepared.windows[length], heads, described, sample, watching)

    def _with_roles(self, result: RunResult, prepared: Prepared, heads: Heads, watching: Progress) -> RunResult:
        """With roles, measured on as many sequences of the data as of random tokens."""
        check_unchanged(prepared.model)
        batches = prepared.windows.get(self.length, [])[: -(-SEQUENCES // SIZE)]
        data = {"inputs" if self.text is None else "text": batches} if batches else {}
        options = Options(length=self.length)
        rows, facts, notes = run(prepared.model, heads, prepared.tokenizer, data, options, watching)
        roles = {(row["layer"], row["head"]): {key: row[key] for key in ("role", "roles", "scores")} for row in rows}
        return replace(result, roles=roles, facts_of_roles={**facts, "notes": notes})


@dataclass(frozen=True)
class RunResult:
    """What came of running a model: metrics on data, also in windows of other lengths, and roles by layer and head."""

    on_data: OnData = field(default_factory=OnData)
    lengths: Mapping[int, OnData] = field(default_factory=dict)
    roles: Mapping[tuple[int, int], dict[str, Any]] | None = None
    facts_of_roles: Mapping[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Provenance: the data, and how roles were measured."""
        return {"data": self.on_data.facts} | ({} if self.roles is None else {"roles": self.facts_of_roles})

    @property
    def sample(self) -> dict[str, Any] | None:
        """The sample as stored in a look; None without one."""
        return None if self.on_data.sample is None else self.on_data.sample.to_dict()


def estimated_costs(
    prepared: Prepared, batches: Sequence[Batch], heads: Heads, layers: Sequence[int], progress: Progress
) -> Ablation:
    """The estimated cost of every set of parts of the heads of some layers; ValueError if the model has no loss."""
    model = prepared.model
    size = sum(weight.numel() for weight in model.parameters()) * (typical_length(list(batches)) or LENGTH)
    some = _first(batches, min(max(int(COST_WORK / max(size, 1)), COST_SEQUENCES[0]), COST_SEQUENCES[1]))
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
    means = "position" if sum(map(rows_of, some)) >= COST_SEQUENCES[0] else "global"
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
