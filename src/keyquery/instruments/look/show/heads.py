"""What the page of a look has of each head, beyond the measures of all heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.needs import costs_without
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show.shares import BARS, CHANGES, has_data, labelled
from keyquery.instruments.roles.show import role_chips
from keyquery.intervene.head_output import KINDS
from keyquery.pages.packing import pack, pack_bytes
from keyquery.reading import short

MIN_INTERACTION, NAMED = 0.005, 3  # smallest interaction that is listed, and how many are
MANY = 400  # heads above which only the outermost values of a spectrum are kept
OUTERMOST = 64


def tones(names: Iterable[str]) -> list[str]:
    """The colours of parts and labels: grey for what is no part of a bar."""
    return [f"var(--{name})" if name in BARS else "var(--muted)" for name in names]


def costs_of(head: Mapping[str, Any]) -> dict[str, Any]:
    """The costs that a page shows: of each part left out, and of the whole head."""
    costs = head.get("ablation") or {}
    return {**costs_without(costs), **{kind: costs[kind] for kind in KINDS if kind in costs}}


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
        "blocks": list(_charts(head, look, kept)),
    }


def _charts(head: Mapping[str, Any], look: Look, kept: int) -> Iterator[dict[str, Any]]:
    """The charts of a head in their order, with what is not a measure of all heads."""
    if head["on_data"]:
        pairs = sorted(head["on_data"].get("interactions", {}).items(), key=lambda pair: -abs(pair[1]))
        shown = [f"{name} {value:.0%}" for name, value in pairs[:NAMED] if abs(value) >= MIN_INTERACTION]
        yield {"type": "shares", "under": ", ".join(shown)}
    elif not has_data(look):
        yield {"type": "shares"}
    if costs_of(head):
        yield {"type": "costs"}
    if "roles" in head:
        yield {"type": "roles", "size": "half"}
    yield {"type": "numbers"}
    if "corpus" in head:
        yield {"type": "corpus"}
    if curves := short(head["raw"].get("offsets"), 4):
        yield {"type": "offsets", "x": curves["offset"], "values": [curves["contents"], curves["exchange"]]}
    if kept and "scores" in head:
        causal = any(row.get("causal") for row in look.layers if row["layer"] == head["layer"])
        yield {"type": "attention", "causal": causal, "maps": _maps(head["scores"], causal, kept)}
    count = len(look.heads)
    yield {"type": "spectra", "views": {view: {"values": _spectra(head[view], count)} for view in ("raw", "folded")}}
    if "objects" in head:
        ends = [[row["value"], row["tokens"], row["opposite"]] for row in head["objects"]]
        pairs_of_tokens = [[row["value"], row["pairs"]] for row in head["relations"]]
        yield {"type": "directions", "rows": short(ends, 4)}
        yield {"type": "planes", "rows": short(pairs_of_tokens, 4)}


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
