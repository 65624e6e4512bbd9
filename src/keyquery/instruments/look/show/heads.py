"""One head on the page of a look: charts, with what each head brings to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keyquery.forms.parts import PARTS
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show.measures import VIEWS, costs_of, label_tone, labelled, part_names
from keyquery.instruments.look.show.shares import (
    BARS,
    CHANGES,
    OF_DATA,
    OF_WEIGHTS,
    bar_shares,
    has_data,
    window,
)
from keyquery.instruments.roles.show import role_chart, role_chips, role_scores
from keyquery.pages.colours import WHOLE
from keyquery.pages.packing import pack, pack_bytes
from keyquery.reading import short

LEAST, NAMED = 0.005, 3  # smallest interaction that is listed, and how many are
MANY = 400  # heads above which only the outermost values of a spectrum are kept
OUTERMOST = 64


HALF = {"size": "half"}
CORPUS_CHART = {
    **{"type": "bars", "name": "corpus", "title": "Co-occurrence", "form": "signed", "dots": True, **HALF},
    "note": "cosines with the PPMI of the corpus; tick: null level",
    "names": ["symmetric", "skew"],
    "tones": ["var(--symmetric)", "var(--skew)"],
}
SPECTRA_CHART = {
    **{"type": "spectra", "title": "Spectra", "by": ["view"], "switch": ["view", {"raw": "raw", "folded": "folded"}]},
    "parts": [
        {"name": "Spectrum of S", "note": "symmetric part: eigenvalues", "tone": "var(--symmetric)"},
        {"name": "Spectrum of A", "note": "skew part: singular values", "tone": "var(--skew)"},
        {"name": "Spectrum of M", "note": "full QK matrix: singular values", "tone": "var(--muted)"},
    ],
}
DIRECTIONS_CHART = {
    **{"type": "directions", "title": "Symmetric directions", **HALF},
    "note": "eigenvectors of S, with the tokens at both ends",
}
PLANES_CHART = {
    **{"type": "directions", "title": "Skew planes", "relations": True, **HALF},
    "note": "planes of A: query token → key token",
}


def charts(look: Look, frame: Mapping[str, Any], kept: int) -> list[dict[str, Any]]:
    """The charts of a head, without the data that each head brings; what is in the frame is drawn from there."""
    views = {"type": "numbers", "name": "metrics", "title": "Metrics", "views": VIEWS, **HALF}
    views["note"] = "weights (raw), with biases and norms (folded), contents on data with 95 % intervals"
    views["without"] = [*part_names(look), "interaction", "sink"]
    attention: dict[str, Any] = {
        "type": "attention",
        "name": "attention",
        "title": "Attention on the text, and its parts",
    }
    attention |= {"note": _attention_note(look, kept), "names": ["attention", *PARTS]}
    attention["tones"] = ["var(--ink)", *(f"var(--{part})" for part in PARTS)]
    roles = {**role_chart([head.get("roles") or {} for head in look.heads]), **HALF}
    lengths = [_lengths_chart(), _lengths_chart(("symmetry",))]
    keys = [one["key"] for one in frame["measures"]]
    first = [_shares_chart(look, keys), _cost_chart(keys), views, *lengths, CORPUS_CHART, roles, _offsets_chart()]
    return [*first, attention, SPECTRA_CHART, DIRECTIONS_CHART, PLANES_CHART]


def _tone(part: str) -> str:
    return f"var(--{part})" if part in BARS else "var(--muted)"


def _shares_chart(look: Look, keys: Sequence[str]) -> dict[str, Any]:
    chart = {"type": "bars", "name": "parts", "title": "Parts of the scores", "form": "percent", "most": 1, **HALF}
    chart["prefix"] = "largest interactions: "
    if not has_data(look):
        return {**chart, "note": OF_WEIGHTS, "names": list(PARTS[:2]), "tones": [_tone(part) for part in PARTS[:2]]}
    parts = [part for part in (*part_names(look), "interaction", "sink") if f"on_data.{part}" in keys]
    chart |= {"note": f"{OF_DATA}, {window(look)}; 95 % intervals", "measures": [f"on_data.{part}" for part in parts]}
    return {**chart, "names": parts, "tones": [_tone(part) for part in parts]}


def _cost_chart(keys: Sequence[str]) -> dict[str, Any]:
    off = [key.removeprefix("off.") for key in keys if key.startswith("off.")]
    chart = {"type": "bars", "name": "ablation", "title": "Ablation", "form": "change", "dots": True, **HALF}
    chart["note"] = "change of the loss in nats per token with one part of this head ablated, 95 % interval"
    chart |= {"measures": [f"off.{part}" for part in off], "names": [WHOLE.get(part, part) for part in off]}
    return {**chart, "tones": [_tone(part) for part in off], "hollow": "zero"}


# Their numbers, by which heads refer to them.
SHARES, ABLATION, METRICS, LENGTHS, SYMMETRY, CORPUS, ROLES, OFFSETS, ATTENTION, SPECTRA, OBJECTS, RELATIONS = range(12)


def _lengths_chart(names: Sequence[str] = PARTS) -> dict[str, Any]:
    title = "By window length" if names is PARTS else "Symmetry by window length"
    block = {"type": "curve", "size": "half", "title": title, "note": "window length in tokens; 95 % intervals"}
    ends = {"least": 0, "most": 1, "form": "percent"} if names is PARTS else {"least": -1, "most": 1, "form": "signed"}
    return {**block, **ends, "names": True, "sizes": True, "unit": "tokens", "name": "lengths"}


TONES = {"contents": "var(--symmetric)", "exchange": "var(--skew)"}  # of curves over the offset


def _offsets_chart() -> dict[str, Any]:
    note = "symmetry of M(Δ) under RoPE, when swapping contents only, or tokens with their positions (exchange)"
    block = {"type": "curve", "size": "half", "title": "Symmetry by offset", "note": note, "names": True}
    block["series"] = [{"name": name, "tone": tone} for name, tone in TONES.items()]
    return {**block, "least": -1, "most": 1, "form": "signed", "unit": "offset", "name": "offsets"}


def _attention_note(look: Look, kept: int) -> str:
    tokens = len((look.sample or {}).get("tokens", []))
    notes = [
        "rows are queries, columns are keys; coloured: positive, small and grey: negative, one scale for all parts"
    ]
    notes += ["the mean of each row is subtracted from each part (softmax is invariant to it)"]
    notes += list((look.sample or {}).get("notes", []))
    if 0 < kept < tokens:
        notes.append(f"the first {kept} of {tokens} tokens")
    return "; ".join(notes)


def item(head: Mapping[str, Any], look: Look, kept: int) -> dict[str, Any]:
    """What the page says of one head beyond its measures."""
    layer = next(row for row in look.layers if row["layer"] == head["layer"])
    data = head["on_data"] or {}
    chips: list[list[Any]] = [[labelled(head), label_tone(head["label"])]]
    if changed := data.get("changes_with_window"):
        chips.append(
            [
                f"{CHANGES} {', '.join(changed)}",
            ]
        )
    chips += [[name] for name in head.get("properties", [])] + role_chips(head.get("roles") or {"roles": []})
    about = [
        f"rank {head['rank']}",
        f"scale {head['scale']:.3g}",
        *(["cross-attention"] if head["kind"] == "cross" else []),
    ]
    return {
        "chips": chips,
        "sentences": [head["reason"]] if head.get("reason") else [],
        "about": " · ".join(about),
        "blocks": _blocks(head, look, kept, bool(layer.get("causal"))),
    }


def _blocks(head: Mapping[str, Any], look: Look, kept: int, causal: bool) -> list[dict[str, Any]]:
    """The charts of one head, each with what it adds to its template."""
    blocks: list[dict[str, Any]] = []
    if head["on_data"]:
        blocks.append({"of": SHARES, "under": _interactions(head["on_data"])})
    elif not has_data(look):
        blocks.append({"of": SHARES, "rows": [[value] for value in short(bar_shares(head)[:2], 4)]})
    if costs_of(head):
        blocks.append({"of": ABLATION})
    if "roles" in head:
        blocks.append({"of": ROLES, **role_scores(head["roles"])})
    blocks.append({"of": METRICS})
    if head.get("lengths") and head["on_data"]:
        blocks += _lengths(head, look)
    if "corpus" in head:
        blocks.append({"of": CORPUS, **_corpus(head["corpus"])})
    if "offsets" in head["raw"]:
        offsets = short(head["raw"]["offsets"], 4)
        blocks.append({"of": OFFSETS, "x": offsets["offset"], "values": [offsets[name] for name in TONES]})
    if kept and "scores" in head:
        blocks.append({"of": ATTENTION, "causal": causal, "maps": _maps(head["scores"], causal, kept)})
    packed = {view: _spectra(head[view], len(look.heads)) for view in ("raw", "folded")}
    blocks.append({"of": SPECTRA, "views": {view: {"values": values} for view, values in packed.items()}})
    if "objects" in head:
        objects = [short([one["value"], one["tokens"], one["opposite"]], 4) for one in head["objects"]]
        relations = [short([one["value"], one["pairs"]], 4) for one in head["relations"]]
        blocks += [{"of": OBJECTS, "rows": objects}, {"of": RELATIONS, "rows": relations}]
    return blocks


def _interactions(data: Mapping[str, Any]) -> str:
    pairs = sorted(data.get("interactions", {}).items(), key=lambda pair: -abs(pair[1]))
    named = [f"{name} {value:.0%}" for name, value in pairs[:NAMED] if abs(value) >= LEAST]
    return ", ".join(named)


def _lengths(head: Mapping[str, Any], look: Look) -> list[dict[str, Any]]:
    """Shares and symmetry over the window length, with the look's own window among them."""
    facts = look.provenance.get("data") or {}
    own = {"length": facts.get("longest", facts.get("length")), **head["on_data"]}
    rows = [row for row in head["lengths"] if row["length"] != own["length"]] + [own]
    rows = sorted(rows, key=lambda row: row["length"])
    blocks = []
    for template, names in ((LENGTHS, PARTS), (SYMMETRY, ("symmetry",))):
        series = []
        for name in names:
            ends = [row.get("intervals", {}).get(name) or [None, None] for row in rows]
            values = {
                "values": [row[name] for row in rows],
                "low": [low for low, _ in ends],
                "high": [high for _, high in ends],
            }
            tone = f"var(--{name})" if name in PARTS else "var(--ink)"
            series.append({"name": name, "tone": tone, **short(values, 3)})
        lengths = [row["length"] for row in rows]
        blocks.append({"of": template, "x": lengths, "xs": lengths, "series": series})
    return blocks


def _corpus(metrics: Mapping[str, float]) -> dict[str, Any]:
    def level(name: str) -> float:
        return max(metrics[f"{name}_chance"], metrics[f"{name}_random"])

    rows = [[metrics[name], None, None, level(name)] for name in ("symmetric_cosine", "skew_cosine")]
    filled = [i for i, row in enumerate(rows) if abs(row[0] or 0.0) > (row[3] or 0.0)]
    under = f"both explain {metrics['explained']:.1%} of its scores (chance {level('explained'):.1%})"
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
