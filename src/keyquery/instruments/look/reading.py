"""`Look`: what `look` returns. Opening a file of one imports this module, and no analysis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from keyquery.instruments.ablation.needs import Cost, costs_without, need_of
from keyquery.instruments.look.validity import check_look
from keyquery.instruments.roles.naming import flat_scores
from keyquery.reading import Reading
from keyquery.support.printable import counted

if TYPE_CHECKING:
    from keyquery.instruments.ablation.ablate import Ablation

SYMMETRIC = 0.8  # |symmetry| of the weights from which a head without costs is symmetric or skew
# Names of schema 1.
FORMER = {
    "directionality": "column_directionality",
    "directionality_norms": "column_directionality_norms",
    **{f"compares{of}": f"symmetric_cosine{of}" for of in ("", "_chance", "_random")},
    **{f"points{of}": f"skew_cosine{of}" for of in ("", "_chance", "_random")},
}


@dataclass(frozen=True, kw_only=True)
class Look(Reading, kind="look"):
    """The geometry of every head and layer of a model.

    Each metric belongs to one view: `raw` is the QK form of the weights, `folded` has biases and LayerNorm parameters
    folded in, `on_data` is measured on activations.
    """

    units: ClassVar[Mapping[str, str]] = {
        "symmetry": "tr(M²)/‖M‖², −1 skew to 1 symmetric",
        "column_directionality": "−1 columns to 1 rows stand out, by what exceeds mean + 2 std",
        "column_directionality_norms": "the same, by whole norms",
        "symmetric_energy": "‖S‖²",
        "skew_energy": "‖A‖²",
        "positive_share": "of ‖S‖²",
        "effective_rank": "exp of the entropy of σ(M)",
        "stable_rank": "‖M‖²/σ₁²",
        "eigenvalues": "of S, descending",
        "skew_values": "singular values of A, descending",
        "singular_values": "of M, descending",
        "scale": "by which the model multiplies the score",
        "scores": "of the sample's tokens, query by key, scaled; their sum's softmax is the attention",
        "symmetric": "of the variance of scores over visible pairs; so are skew, popularity, query_only, position",
        "interaction": "of that variance: 2·covariances between parts; shares and interaction sum to 1",
        "sink": "of that variance: the first key against all others, in the position part",
        "half_window": "the same shares over pairs within the first half of each window",
        "effective_rank_symmetric": "of S on data, at offset 0; likewise effective_rank_skew",
        "contents": "symmetry of M(Δ): contents change places, the offset stays",
        "symmetric_cosine": "cosine of the symmetric parts of scores between tokens and of a corpus's PPMI, centred",
        "skew_cosine": "the same of the skew parts: above 0 at what comes after, below 0 at what comes before",
        "explained": "share of the scores between tokens that the corpus's PPMI accounts for",
        "roles": "attention to the keys of each role, with null levels and intervals: units of the kind roles",
        "exchange": "symmetry of ½(M(Δ) ± M(−Δ)ᵀ): tokens change places with their positions",
    }

    former = FORMER
    model: Mapping[str, Any]  # name and facts of the model
    layers: list[dict[str, Any]]  # metrics and notes per layer
    heads: list[dict[str, Any]]  # metrics by view, shares and label per head
    sample: Mapping[str, Any] | None = None  # scores by part of the first tokens, if kept
    corpus: Mapping[str, Any] | None = None  # the corpus that heads are compared with, if any
    summary: Mapping[str, int] = field(default_factory=dict)  # heads per label, most frequent first; recomputed

    def __post_init__(self) -> None:
        super().__post_init__()
        check_look(self.model, self.layers, self.heads)
        counts = Counter(head["label"] for head in self.heads).most_common()
        object.__setattr__(self, "summary", dict(counts))

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {label}" for label, count in self.summary.items())
        size = f"{counted(len(self.heads), 'head')} in {counted(len(self.layers), 'layer')}"
        return f"Look({self.model['name']}: {size}: {counts})"

    def with_costs(self, ablation: Ablation) -> Look:
        """A copy with the costs of an ablation of this model by head.

        If costs of all sets are known, as with `changes="needs"`, labels say what a head needs, by the ablation's
        threshold.

        >>> from keyquery.layers import LanguageModel
        >>> model = LanguageModel.load(kq.models.DECODER)
        >>> data = [{"input_ids": torch.arange(480).reshape(32, 15) + 300}]
        >>> costs = kq.ablate(model, data, heads="0.0", changes="needs", measure="none")
        >>> kq.look(model).with_costs(costs).heads[0]["evidence"]
        'estimated'
        """
        costs, known = ablation.costs(), {(head["layer"], head["head"]) for head in self.heads}
        decides = ablation.unit.startswith("nats")  # as the threshold of labels is
        if not set(costs) <= known:
            raise ValueError(f"the look has no head {min(set(costs) - known)}: it belongs to another model")
        estimated = {(row["layer"], row["head"]) for row in ablation.rows if row.get("evidence") == "estimated"}
        heads = []
        for head in self.heads:
            cell = head["layer"], head["head"]
            if cell in costs:
                evidence = "estimated" if cell in estimated else "measured"
                new = label_head(head["raw"], head["on_data"], costs[cell], evidence, ablation.threshold)
                merged = {**head.get("ablation", {}), **costs[cell]}
                head = {**head, "ablation": merged, **(new if decides and new["evidence"] == evidence else {})}
            heads.append(head)
        facts = {"sequences": ablation.sequences, "objective": ablation.objective, "unit": ablation.unit}
        facts |= {"threshold": ablation.threshold} if decides else {}
        return replace(self, heads=heads, provenance={**self.provenance, "costs": facts})

    def records(self) -> list[dict[str, Any]]:
        """One row per head: layer, head, every scalar metric of each view, its interval, and the label."""
        rows = []
        for head in self.heads:
            row = {key: head.get(key) for key in ("layer", "head", "name", "kind", "scale", "rank")}
            for view in ("raw", "folded", "on_data"):
                metrics = head[view] or {}
                row |= {f"{view}_{key}": value for key, value in metrics.items() if not isinstance(value, (list, dict))}
                for key, ends in metrics.get("intervals", {}).items():
                    low, high = ends or (None, None)
                    row |= {f"{view}_{key}_low": low, f"{view}_{key}_high": high}
            row |= {f"corpus_{key}": value for key, value in head.get("corpus", {}).items()}
            if by_role := head.get("roles"):
                row |= {"role": by_role["role"], "roles": ", ".join(by_role["roles"]), **flat_scores(by_role["scores"])}
            costs = head.get("ablation", {})
            for part, (change, low, high) in {**costs_without(costs), **costs}.items():
                row |= {f"cost_{part}": change, f"cost_{part}_low": low, f"cost_{part}_high": high}
            known = {key: head[key] for key in ("label", "evidence")}
            rows.append({**row, **known, "properties": ", ".join(head["properties"])})
        return rows


def label_head(
    weights: Mapping[str, Any],
    on_data: Mapping[str, Any] | None = None,
    costs: Mapping[str, Cost] | None = None,
    evidence: str = "estimated",
    threshold: float = 0.0,
) -> dict[str, Any]:
    """Label, needs, reason and evidence of a head: what it needs, by costs; without costs, what its weights show.

    Variance gives no label: docs/studies/labels.md shows how little it predicts.
    """
    data = on_data or {}
    sink = data.get("sink", 0.0) > data.get("position", 0.0) / 2 > 0  # most of the position part is the first key's
    need = need_of(costs or {}, threshold, sink)
    if need is not None:
        return {**need._asdict(), "evidence": evidence}
    symmetry = weights["symmetry"]
    label = "symmetric" if symmetry >= SYMMETRIC else "skew" if symmetry <= -SYMMETRIC else "undecided"
    return {"label": label, "reason": f"symmetry {symmetry:.2f}, from the weights alone", "evidence": "weights"}
