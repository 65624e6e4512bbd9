"""One head on the page of a look: charts, with what each head brings to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.needs import costs_without
from keyquery.instruments.look.embeddings import level
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show.shares import (
    BARS,
    CHANGES,
    OF_WEIGHTS,
    bar_shares,
    has_data,
    labelled,
    of_shares,
    part_names,
)
from keyquery.instruments.roles.show import role_chart, role_chips, role_scores
from keyquery.intervene.head_output import KINDS
from keyquery.pages.colours import WHOLE
from keyquery.pages.packing import pack, pack_bytes
from keyquery.reading import short

VIEWS = {"raw": "raw", "folded": "folded", "on_data": "on data"}
LEAST, NAMED = 0.005, 3  # smallest interaction that is listed, and how many are
MANY = 400  # heads above which only the outermost values of a spectrum are kept
OUTERMOST = 64
HALF = {"size": "half"}
CURVES = {"contents": "var(--symmetric)", "exchange": "var(--skew)"}  # over the offset
# The charts that are the same for every look.
FIXED: dict[str, dict[str, Any]] = {
    "corpus": {
        **{"type": "bars", "name": "corpus", "title": "Co-occurrence", "form": "signed", "dots": True, **HALF},
        "note": "cosines with the PPMI of the corpus; tick: null level",
        "names": ["symmetric", "skew"],
        "tones": ["var(--symmetric)", "var(--skew)"],
    },
    "offsets": {
        **{"type": "curve", "title": "Symmetry by offset", "names": True, "unit": "offset", "name": "offsets", **HALF},
        "note": "symmetry of M(Δ) under RoPE, when swapping contents only, or tokens with their positions (exchange)",
        "series": [{"name": name, "tone": tone} for name, tone in CURVES.items()],
        **{"least": -1, "most": 1, "form": "signed"},
    },
    "spectra": {
        **{"type": "spectra", "title": "Spectra", "by": ["view"]},
        "switch": ["view", {"raw": "raw", "folded": "folded"}],
        "parts": [
            {"name": "Spectrum of S", "note": "symmetric part: eigenvalues", "tone": "var(--symmetric)"},
            {"name": "Spectrum of A", "note": "skew part: singular values", "tone": "var(--skew)"},
            {"name": "Spectrum of M", "note": "full QK matrix: singular values", "tone": "var(--muted)"},
        ],
    },
    "objects": {
        **{"type": "directions", "title": "Symmetric directions", **HALF},
        "note": "eigenvectors of S, with the tokens at both ends",
    },
    "relations": {
        **{"type": "directions", "title": "Skew planes", "relations": True, **HALF},
        "note": "planes of A: query token → key token",
    },
}
CHARTS = ("parts", "ablation", "metrics", "corpus", "roles", "offsets", "attention", "spectra", "objects", "relations")
NUMBERS = {name: number for number, name in enumerate(CHARTS)}  # by which heads refer to them


def tones(names: Iterable[str]) -> list[str]:
    """The colours of parts and labels: grey for what is no part of a bar."""
    return [f"var(--{name})" if name in BARS else "var(--muted)" for name in names]


def costs_of(head: Mapping[str, Any]) -> dict[str, Any]:
    """The costs that a page shows: of each part left out, and of the whole head."""
    costs = head.get("ablation") or {}
    return {**costs_without(costs), **{kind: costs[kind] for kind in KINDS if kind in costs}}


def charts(look: Look, frame: Mapping[str, Any], kept: int) -> list[dict[str, Any]]:
    """The charts of a head, without the data that each head brings; what is in the frame is drawn from there."""
    keys = [one["key"] for one in frame["measures"]]
    metrics = {"type": "numbers", "name": "metrics", "title": "Metrics", "views": VIEWS, **HALF}
    metrics["note"] = "weights (raw), with biases and norms (folded), contents on data with 95 % intervals"
    metrics["without"] = [*part_names(look), "interaction", "sink"]
    attention: dict[str, Any] = {
        "type": "attention",
        "name": "attention",
        "title": "Attention on the text, and its parts",
    }
    attention |= {"note": _attention_note(look, kept), "names": ["attention", *PARTS]}
    attention |= {"tones": ["var(--ink)", *tones(PARTS)]}
    roles = {**role_chart([head.get("roles") or {} for head in look.heads]), **HALF}
    of_look = {"parts": _shares_chart(look, keys), "ablation": _cost_chart(keys), "metrics": metrics}
    return [(FIXED | of_look | {"roles": roles, "attention": attention})[name] for name in CHARTS]


def _shares_chart(look: Look, keys: Sequence[str]) -> dict[str, Any]:
    chart = {"type": "bars", "name": "parts", "title": "Parts of the scores", "form": "percent", "most": 1, **HALF}
    chart["prefix"] = "largest interactions: "
    if not has_data(look):
        return {**chart, "note": OF_WEIGHTS, "names": list(PARTS[:2]), "tones": tones(PARTS[:2])}
    parts = [part for part in (*part_names(look), "interaction", "sink") if f"on_data.{part}" in keys]
    chart |= {"note": f"{of_shares(look)}; 95 % intervals", "measures": [f"on_data.{part}" for part in parts]}
    return {**chart, "names": parts, "tones": tones(parts)}


def _cost_chart(keys: Sequence[str]) -> dict[str, Any]:
    off = [key.removeprefix("off.") for key in keys if key.startswith("off.")]
    chart = {"type": "bars", "name": "ablation", "title": "Ablation", "form": "change", "dots": True, **HALF}
    chart["note"] = "change of the loss in nats per token with one part of this head ablated, 95 % interval"
    chart |= {"measures": [f"off.{part}" for part in off], "names": [WHOLE.get(part, part) for part in off]}
    return {**chart, "tones": tones(off), "hollow": "zero"}


def _attention_note(look: Look, kept: int) -> str:
    sample = look.sample or {}
    notes = [
        "rows are queries, columns are keys; coloured: positive, small and grey: negative, one scale for all parts",
        "the mean of each row is subtracted from each part (softmax is invariant to it)",
        *sample.get("notes", []),
    ]
    if 0 < kept < (tokens := len(sample.get("tokens", []))):
        notes.append(f"the first {kept} of {tokens} tokens")
    return "; ".join(notes)


def item(head: Mapping[str, Any], look: Look, kept: int) -> dict[str, Any]:
    """What the page says of one head beyond its measures."""
    chips: list[list[Any]] = [[labelled(head), *tones([head["label"]])]]
    if changed := (head["on_data"] or {}).get("changes_with_window"):
        chips.append([f"{CHANGES} {', '.join(changed)}"])
    chips += [[name] for name in head.get("properties", [])] + role_chips(head.get("roles") or {"roles": []})
    about = [f"rank {head['rank']}", f"scale {head['scale']:.3g}"]
    about += ["cross-attention"] if head["kind"] == "cross" else []
    causal = bool(next(row for row in look.layers if row["layer"] == head["layer"]).get("causal"))
    return {
        "chips": chips,
        "sentences": [head["reason"]] if head.get("reason") else [],
        "about": " · ".join(about),
        "blocks": [{"of": NUMBERS[name], **data} for name, data in _blocks(head, look, kept, causal).items()],
    }


def _blocks(head: Mapping[str, Any], look: Look, kept: int, causal: bool) -> dict[str, dict[str, Any]]:
    """What one head adds to its charts, by their names."""
    blocks: dict[str, dict[str, Any]] = {}
    if head["on_data"]:
        blocks["parts"] = {"under": _interactions(head["on_data"])}
    elif not has_data(look):
        blocks["parts"] = {"rows": [[value] for value in short(bar_shares(head)[:2], 4)]}
    if costs_of(head):
        blocks["ablation"] = {}
    if "roles" in head:
        blocks["roles"] = role_scores(head["roles"])
    blocks["metrics"] = {}
    if "corpus" in head:
        blocks["corpus"] = _corpus(head["corpus"])
    if "offsets" in head["raw"]:
        offsets = short(head["raw"]["offsets"], 4)
        blocks["offsets"] = {"x": offsets["offset"], "values": [offsets[name] for name in CURVES]}
    if kept and "scores" in head:
        blocks["attention"] = {"causal": causal, "maps": _maps(head["scores"], causal, kept)}
    views = {view: {"values": _spectra(head[view], len(look.heads))} for view in ("raw", "folded")}
    blocks["spectra"] = {"views": views}
    if "objects" in head:
        directions = [[one["value"], one["tokens"], one["opposite"]] for one in head["objects"]]
        planes = [[one["value"], one["pairs"]] for one in head["relations"]]
        blocks |= {"objects": {"rows": short(directions, 4)}, "relations": {"rows": short(planes, 4)}}
    return blocks


def _interactions(data: Mapping[str, Any]) -> str:
    pairs = sorted(data.get("interactions", {}).items(), key=lambda pair: -abs(pair[1]))
    return ", ".join(f"{name} {value:.0%}" for name, value in pairs[:NAMED] if abs(value) >= LEAST)


def _corpus(metrics: Mapping[str, float]) -> dict[str, Any]:
    rows = [[metrics[name], None, None, level(metrics, name)] for name in ("symmetric_cosine", "skew_cosine")]
    filled = [i for i, row in enumerate(rows) if abs(row[0] or 0.0) > (row[3] or 0.0)]
    under = f"both explain {metrics['explained']:.1%} of its scores (chance {level(metrics, 'explained'):.1%})"
    return {"rows": short(rows, 3), "filled": filled, "under": under}


def _spectra(metrics: Mapping[str, Any], count: int) -> list[str]:
    """Spectra of S, A and M; singular values of A come in pairs, of which one is kept."""
    series = [metrics["eigenvalues"], metrics["skew_values"][::2], metrics["singular_values"]]
    if count > MANY and len(series[0]) > OUTERMOST:
        series[0] = series[0][: OUTERMOST // 2] + series[0][-OUTERMOST // 2 :]
    return [pack(values[:OUTERMOST] if count > MANY else values) for values in series]


def _maps(scores: Mapping[str, Any], causal: bool, kept: int) -> list[tuple[float, str]]:
    """The attention of the first tokens and the parts of their scores, over the keys visible to each query.

    The mean over keys is subtracted from each part, since softmax is invariant to it.
    """
    parts = np.array([scores[part] for part in PARTS])[:, :kept, :kept]
    seen = np.tril(np.ones((kept, kept), dtype=bool), 0 if causal else kept)
    total = np.where(seen, parts.sum(0), -np.inf)
    raised = np.exp(total - total.max(-1, keepdims=True))
    means = (parts * seen).sum(-1, keepdims=True) / seen.sum(-1, keepdims=True)
    attention = raised / raised.sum(-1, keepdims=True)
    return [pack_bytes(values[seen]) for values in (attention, *(parts - means))]
