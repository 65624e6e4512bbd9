"""One head on the page of a look: its charts, and what each head brings to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.needs import costs_without
from keyquery.instruments.look.embeddings import NAMES
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
from keyquery.instruments.roles.show import role_chips
from keyquery.intervene.head_output import KINDS
from keyquery.pages.colours import WHOLE
from keyquery.pages.packing import pack, pack_bytes
from keyquery.reading import short

LEAST, NAMED = 0.005, 3  # smallest interaction that is listed, and how many are
MANY = 400  # heads above which only the outermost values of a spectrum are kept
OUTERMOST = 64
CURVES = {"contents": "var(--symmetric)", "exchange": "var(--skew)"}  # over the offset


def tones(names: Iterable[str]) -> list[str]:
    """The colours of parts and labels: grey for what is no part of a bar."""
    return [f"var(--{name})" if name in BARS else "var(--muted)" for name in names]


def costs_of(head: Mapping[str, Any]) -> dict[str, Any]:
    """The costs that a page shows: of each part left out, and of the whole head."""
    costs = head.get("ablation") or {}
    return {**costs_without(costs), **{kind: costs[kind] for kind in KINDS if kind in costs}}


def charts(look: Look, frame: Mapping[str, Any], kept: int) -> dict[str, dict[str, Any]]:
    """The charts of a head by name, without what each head brings; what is in the frame is drawn from there."""
    keys = [measure["key"] for measure in frame["measures"]]
    off = [key.removeprefix("off.") for key in keys if key.startswith("off.")]
    corpus = ("symmetric", "skew", "explained")
    notes, tokens = list((look.sample or {}).get("notes", [])), len((look.sample or {}).get("tokens", []))
    of_charts: dict[str, dict[str, Any]] = {
        "parts": _shares(look, keys),
        "ablation": {
            "title": "Ablation",
            "note": "change of the loss in nats per token with one part of this head ablated, 95 % interval",
            "measures": [f"off.{part}" for part in off],
            "names": [WHOLE.get(part, part) for part in off],
            **{"tones": tones(off), "dots": True, "form": "change", "hollow": "zero"},
        },
        "roles": {"type": "roles"},
        "metrics": {"type": "numbers", "without": [*part_names(look), "interaction", "sink"]},  # which have charts
        "corpus": {
            "title": "Co-occurrence",
            "note": "cosines with the PPMI of the corpus, and share of the scores that both explain; tick: null level",
            "measures": [f"corpus.{name}" for name in NAMES],
            **{"names": corpus, "tones": tones(corpus), "dots": True, "hollow": "null"},
        },
        "offsets": {
            **{"type": "curve", "title": "Symmetry by offset", "names": True, "unit": "offset"},
            "note": "symmetry of M(Δ) under RoPE, swapping contents only, or tokens with their positions (exchange)",
            "series": [{"name": name, "tone": tone} for name, tone in CURVES.items()],
            **{"least": -1, "most": 1, "form": "signed"},
        },
    }
    of_charts = {name: {"type": "bars", "name": name, "size": "half", **chart} for name, chart in of_charts.items()}
    notes += [f"the first {kept} of {tokens} tokens"] if kept < tokens else []
    attention = {"type": "attention", "names": ["attention", *PARTS], "tones": ["var(--ink)", *tones(PARTS)]}
    return {**of_charts, "attention": {**attention, "notes": notes}}


def _shares(look: Look, keys: Sequence[str]) -> dict[str, Any]:
    chart = {"title": "Parts of the scores", "form": "percent", "most": 1, "prefix": "largest interactions: "}
    parts: Sequence[str] = PARTS[:2]
    if not has_data(look):
        return {**chart, "note": OF_WEIGHTS, "names": parts, "tones": tones(parts)}
    parts = [part for part in (*part_names(look), "interaction", "sink") if f"on_data.{part}" in keys]
    chart |= {"note": f"{of_shares(look)}; 95 % intervals", "measures": [f"on_data.{part}" for part in parts]}
    return {**chart, "names": parts, "tones": tones(parts)}


def item(head: Mapping[str, Any], look: Look, kept: int) -> dict[str, Any]:
    """What the page says of one head beyond its measures."""
    chips: list[list[Any]] = [[labelled(head), *tones([head["label"]])]]
    if changed := (head["on_data"] or {}).get("changes_with_window"):
        chips.append([f"{CHANGES} {', '.join(changed)}"])
    chips += [[name] for name in head.get("properties", [])] + role_chips(head.get("roles") or {"roles": []})
    about = [f"rank {head['rank']}", f"scale {head['scale']:.3g}"]
    about += ["cross-attention"] if head["kind"] == "cross" else []
    return {
        "chips": chips,
        "sentences": [head["reason"]] if head.get("reason") else [],
        "about": " · ".join(about),
        "blocks": [*_of_charts(head, look, kept), *_of_weights(head, len(look.heads))],
    }


def _of_charts(head: Mapping[str, Any], look: Look, kept: int) -> list[dict[str, Any]]:
    """What a head brings to its charts, in their order."""
    blocks: dict[str, Any] = {}
    if head["on_data"]:
        pairs = sorted(head["on_data"].get("interactions", {}).items(), key=lambda pair: -abs(pair[1]))
        shown = [f"{name} {value:.0%}" for name, value in pairs[:NAMED] if abs(value) >= LEAST]
        blocks["parts"] = {"under": ", ".join(shown)}
    elif not has_data(look):
        blocks["parts"] = {"rows": [[value] for value in short(bar_shares(head)[:2], 4)]}
    if costs_of(head):
        blocks["ablation"] = {}
    if "roles" in head:
        blocks["roles"] = {}
    blocks["metrics"] = {}
    if "corpus" in head:
        blocks["corpus"] = {}
    if offsets := short(head["raw"].get("offsets"), 4):
        blocks["offsets"] = {"x": offsets["offset"], "values": [offsets[name] for name in CURVES]}
    if kept and "scores" in head:
        causal = any(row.get("causal") for row in look.layers if row["layer"] == head["layer"])
        blocks["attention"] = {"causal": causal, "maps": _maps(head["scores"], causal, kept)}
    return [{"of": name, **data} for name, data in blocks.items()]


def _of_weights(head: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Spectra and directions, whose charts are the same for every look."""
    blocks: list[dict[str, Any]] = [
        {"type": "spectra", "views": {view: {"values": _spectra(head[view], count)} for view in ("raw", "folded")}}
    ]
    if "objects" in head:
        ends = [[row["value"], row["tokens"], row["opposite"]] for row in head["objects"]]
        pairs = [[row["value"], row["pairs"]] for row in head["relations"]]
        blocks.append({"type": "directions", "rows": short(ends, 4)})
        blocks.append({"type": "directions", "rows": short(pairs, 4), "relations": True})
    return blocks


def _spectra(metrics: Mapping[str, Any], count: int) -> list[str]:
    """Spectra of S, A and M; singular values of A come in pairs, of which one is kept."""
    series = [metrics["eigenvalues"], metrics["skew_values"][::2], metrics["singular_values"]]
    if count > MANY and len(series[0]) > OUTERMOST:
        series[0] = series[0][: OUTERMOST // 2] + series[0][-OUTERMOST // 2 :]
    return [pack(values[:OUTERMOST] if count > MANY else values) for values in series]


def _maps(scores: Mapping[str, Any], causal: bool, kept: int) -> list[tuple[float, str]]:
    """Attention and the parts of the scores over the keys visible to each query, each part without its mean."""
    parts = np.array([scores[part] for part in PARTS])[:, :kept, :kept]
    seen = np.tril(np.ones((kept, kept), dtype=bool), 0 if causal else kept)
    total = np.where(seen, parts.sum(0), -np.inf)
    raised = np.exp(total - total.max(-1, keepdims=True))
    means = (parts * seen).sum(-1, keepdims=True) / seen.sum(-1, keepdims=True)
    attention = raised / raised.sum(-1, keepdims=True)
    return [pack_bytes(values[seen]) for values in (attention, *(parts - means))]
