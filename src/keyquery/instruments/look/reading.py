"""`Look`: what `look` returns. Opening a file of one imports this module, and no analysis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.needs import Cost, costs_without, need_of
from keyquery.instruments.roles.naming import check_roles, flat_scores, require
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
# Fields of a look, by their paths.
MODEL = {"name": str, "layers": int, "width": int, "labels": list}
LAYER = {"layer": int, "raw.symmetry": Real, "raw.column_directionality": Real}
HEAD = {"layer": int, "head": int, "name": str, "label": str}
HEAD |= dict.fromkeys(("raw.symmetry", "raw.effective_rank", "folded.symmetry"), Real)
ON_DATA = dict.fromkeys(("symmetry", *PARTS, "interaction"), Real)
CROSS = dict.fromkeys(("pairwise", *PARTS[2:], "interaction"), Real)  # of cross-attention
WORDS = {str: "a string", int: "an integer", list: "a list", Real: "a number"}
LARGEST = 100.0  # of a share or a symmetry, which are around 1
LARGEST_RANK = 1e6
LONGEST = 10_000  # items of a list on data


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
    """What a head needs, by costs, and why; without costs, what its weights show. Variance gives no label."""
    data = on_data or {}
    sink = data.get("sink", 0.0) > data.get("position", 0.0) / 2 > 0  # most of the position part is the first key's
    need = need_of(costs or {}, threshold, sink)
    if need is not None:
        return {**need._asdict(), "evidence": evidence}
    symmetry = weights["symmetry"]
    label = "symmetric" if symmetry >= SYMMETRIC else "skew" if symmetry <= -SYMMETRIC else "undecided"
    return {"label": label, "reason": f"symmetry {symmetry:.2f}, from the weights alone", "evidence": "weights"}


def check_look(model: Any, layers: Any, heads: Any) -> None:
    """Validate the facts, layers and heads of a look; the error names the missing field."""
    model = {"labels": [], **model}
    check_fields("look: model", model, MODEL)
    require(all(isinstance(label, str) for label in model["labels"]), "look: model.labels", "strings", model["labels"])
    for name, rows, fields in (("layers", layers, LAYER), ("heads", heads, HEAD)):
        require(isinstance(rows, list) and bool(rows), f"look: {name}", "a non-empty list", rows)
        for index, row in enumerate(rows):
            check_fields(f"look: {name}[{index}]", row, fields)
            for view in ("raw", "folded"):
                for metric in row.get(view, {}).keys() & {"symmetry", "column_directionality"}:
                    _check_metrics(f"look: {name}[{index}].{view}.{metric}", row[view][metric])
    for index, head in enumerate(heads):
        if (data := head.get("on_data")) is not None:
            crossed = isinstance(data, Mapping) and "pairwise" in data
            check_fields(f"look: heads[{index}].on_data", data, CROSS if crossed else ON_DATA)
            _check_metrics(f"look: heads[{index}].on_data", data)
        if head.get("roles") is not None:
            check_roles(f"look: heads[{index}].roles", head["roles"])
        costs = head.get("ablation", {})
        for row in costs.values() if isinstance(costs, Mapping) else [None]:
            right = isinstance(row, list) and len(row) == 3 and all(type(x) in (int, float) for x in row)
            require(right, f"look: heads[{index}].ablation", "change, low and high by name", row)


def _check_metrics(where: str, value: Any) -> None:
    """Validate shares and intervals: numbers within bounds, lists of bounded length."""
    if isinstance(value, (list, Mapping)):
        require(isinstance(value, Mapping) or len(value) <= LONGEST, where, f"at most {LONGEST} items", "more")
        named = [(f".{key}", item) for key, item in value.items()] if isinstance(value, Mapping) else None
        for suffix, item in named or ((f"[{index}]", item) for index, item in enumerate(value)):
            _check_metrics(f"{where}{suffix}", item)
    elif type(value) in (int, float):
        limit = LARGEST_RANK if ".effective_rank" in where else LARGEST
        require(abs(value) <= limit, where, f"a number from −{limit:g} to {limit:g}", value)


def check_fields(where: str, row: Any, fields: Mapping[str, type]) -> None:
    """Require fields of these types, by their paths."""
    for path, kind in fields.items():
        value = row
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        require(isinstance(value, kind) and not isinstance(value, bool), f"{where}.{path}", WORDS[kind], value)
