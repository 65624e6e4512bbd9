"""The page of a look, which opens offline: its point in sentences, the map of heads, and all of one head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from keyquery.checkpoints.labels import family_of
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.show import cost_measures
from keyquery.instruments.look.embeddings import NAMES, level
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show import triangle
from keyquery.instruments.look.show.heads import MANY, OUTERMOST, costs_of, item, tones
from keyquery.instruments.look.show.shares import (
    BARS,
    CHANGES,
    bar_shares,
    crossed,
    has_data,
    labelled,
    mean_shares,
    of_shares,
    part_names,
    sample_of,
    with_bars,
)
from keyquery.instruments.roles.show import role_measures, role_name, rule
from keyquery.pages.components import column, heads_frame, key_of, measure, versioned
from keyquery.pages.document import document
from keyquery.reading import short
from keyquery.support.printable import counted

TOKENS, DIRECTIONS = 24, 4  # sample tokens and directions per head that a look measures for its page
# Bytes for the score maps: per head, at least (all tokens of 144 causal heads), and at most (1,024 heads below 5 MB).
MAPS_A_HEAD, MIN_MAPS, MAX_MAPS = 2600, 374_000, 1_100_000
VIEWS = {"raw": "raw", "folded": "folded", "on_data": "on data"}
SIGNED = ("symmetry", "column_directionality")  # from −1 to 1


def page(reading: Look) -> str:
    """The page of a look."""
    pictures = [triangle.inline(reading, named=False)]
    name = str(reading.model["name"])
    return document(name, "attention heads", [tab_of(reading, 0)], figures=pictures, style=triangle.STYLE)


def tab_of(look: Look, picture: int) -> dict[str, Any]:
    """Everything that a page says of one look; its triangle is the page's picture of that number."""
    tokens = list((look.sample or {}).get("tokens", []))
    kept = _kept(look, len(tokens))
    frame = _frame(look)
    keys = [entry["key"] for entry in frame["measures"]]
    quick = [key for key in ("cost", "parts", "role", *(f"{view}.symmetry" for view in VIEWS)) if key in keys]
    hints = {CHANGES: "differs in the first half of each window"}
    attention = [*(look.sample or {}).get("notes", [])]
    attention += [f"the first {kept} of {len(tokens)} tokens"] if kept < len(tokens) else []
    return {
        "name": str(look.model["name"]),
        "facts": _facts(look),
        "notes": _notes(look, len(tokens), kept),
        "frame": frame,
        "state": {"at": key_of(_opened(look)), "map": quick[0], "view": "raw"},
        "rows": {str(layer["layer"]): _layer(layer) for layer in look.layers},
        "blocks": [
            _summary(look),
            {"type": "map", "place": "seven", "quick": quick, "side": {"means": "parts"}},
            {"type": "triangle", "place": "five", "picture": picture},
            {"type": "detail", "items": [item(head, look, kept) for head in look.heads], "hints": hints},
            {"type": "items", "columns": [column("label", [labelled(head) for head in look.heads])]},
        ],
        "tokens": tokens[:kept],
        "attention": attention,  # notes on its maps
    }


def _opened(look: Look) -> Mapping[str, Any]:
    """The head that a page opens on: the costliest, else that in which the contents of tokens matter most."""

    def weight(head: Mapping[str, Any]) -> tuple[float, float]:
        data = head["on_data"] or {}
        content = data.get("symmetric", 0.0) + data.get("skew", 0.0) if data else abs(head["raw"]["symmetry"]) - 2
        return max((mean for mean, *_ in costs_of(head).values()), default=-1.0), content

    return max(look.heads, key=weight)


# Measures, for the map and the table


def _frame(look: Look) -> dict[str, Any]:
    """Layers by heads with all measures of a look, costs first."""
    measures = [*cost_measures([costs_of(head) for head in look.heads]), _parts(look)]
    if any("roles" in head for head in look.heads):
        measures += role_measures([head.get("roles") or {} for head in look.heads])
    measures += [*_views(look), *_corpus(look)]
    frame = heads_frame(look.heads, measures, look.model.get("labels") or [])
    return {**frame, "notes": [labelled(head) for head in look.heads]}


def _parts(look: Look) -> dict[str, Any]:
    names = part_names(look)
    shares = [bar_shares(head)[: len(names)] if head["on_data"] or not has_data(look) else None for head in look.heads]
    facts = {"parts": list(names), "tones": tones(names), "unit": of_shares(look)}
    return measure("parts", "parts", shares, digits=3, **facts)


def _views(look: Look) -> Iterator[dict[str, Any]]:
    """The scalar metrics of every view."""
    for view, name in VIEWS.items():
        rows = [head[view] or {} for head in look.heads]
        metrics = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, (int, float)))
        for metric in metrics:
            facts: dict[str, Any] = {"group": name, "unit": Look.units.get(metric)}
            ends = [row.get("intervals", {}).get(metric) or [None, None] for row in rows]
            if any(low is not None for low, _ in ends):
                facts |= {"low": [low for low, _ in ends], "high": [high for _, high in ends]}
            if metric.startswith(SIGNED):
                facts |= {"form": "signed", "least": -1, "most": 1}
            if metric == "symmetry":
                facts |= {"ends": ["skew", "symmetric"], "short": f"symmetry {name}"}
            if metric in (*BARS, "interaction", "sink"):
                facts |= {"form": "percent"}
            values = [row.get(metric) for row in rows]
            yield measure(f"{view}.{metric}", f"{name} {metric.replace('_', ' ')}", values, **facts)


def _corpus(look: Look) -> Iterator[dict[str, Any]]:
    rows = [head.get("corpus") for head in look.heads]
    facts: dict[str, Any] = {"digits": 3, "group": "compared with the corpus"}
    for name in NAMES if any(rows) else ():
        values, null = [row and row[name] for row in rows], [row and level(row, name) for row in rows]
        yield measure(f"corpus.{name}", f"corpus {name.replace('_', ' ')}", values, null=null, **facts)


# Sentences


def _summary(look: Look) -> dict[str, Any]:
    """The point of a look in sentences, and its labels."""
    shares = zip(part_names(look), mean_shares(with_bars(look)), strict=False)
    listed = ", ".join(f"{part} {share:.0%}" for part, share in shares if share >= 0.005)
    of = "score variance on data" if has_data(look) else "‖M‖² of the weights"
    evidence = {"measured": "by measured costs", "estimated": "by estimated costs", "weights": "from the weights only"}
    known = dict.fromkeys(evidence[head["evidence"]] for head in look.heads if head.get("evidence") in evidence)
    return {
        "type": "summary",
        "sentences": [*_costliest(look), f"Shares of {of}, mean over heads: {listed}."],
        "tags": [{"value": count, "name": label, "tone": tones([label])[0]} for label, count in look.summary.items()],
        "note": f"labels of {counted(len(look.heads), 'head')}, {'; '.join(known)}",
    }


def _costliest(look: Look, count: int = 3) -> list[str]:
    """The heads that cost most to lose, with what they do and need."""
    rows = [(max(cost[0] for cost in costs.values()), head) for head in look.heads if (costs := costs_of(head))]
    described = []
    for cost, head in sorted(rows, key=lambda row: -row[0])[:count]:
        role = (head.get("roles") or {}).get("role")
        doing = f", {role_name(role)}" if role else ""
        needs = head["reason"] if head.get("needs") else f"{cost:+.2g} nats per token"
        described.append(f"{key_of(head)}{doing}: {needs}")
    return [f"Costliest heads: {'; '.join(described)}."] if described else []


def _facts(look: Look) -> str:
    model, data = look.model, look.provenance.get("data")
    facts = [f"{model['layers']} layers", f"{len(look.heads)} heads", f"width {model['width']}"]
    facts += [f"architecture {family}"] if (family := family_of(model)) else []
    facts += [sample_of(look) if data else "weights only"]
    if look.corpus is not None:
        facts += [f"compared with {look.corpus.get('from') or 'a corpus'}, {look.corpus['compared']} tokens"]
    return " · ".join(facts)


def _notes(look: Look, tokens: int, kept: int) -> list[str]:
    """Notes on what the page omits, and how to get it."""
    count, on_data, missing = len(look.heads), has_data(look), "not in this page"
    cross = sum(head["kind"] == "cross" for head in look.heads)
    few = 0 < kept < tokens
    cut = count > MANY and max(len(head["raw"]["eigenvalues"]) for head in look.heads) > OUTERMOST
    pairwise = "a pairwise part instead of symmetric and skew, since contents of two sequences cannot be swapped"
    without, described = cross > 0 and on_data and not crossed(look), any("objects" in head for head in look.heads)
    notes = {
        f"Shares on data are {missing}: keyquery look MODEL --text FILE --html page.html": not on_data,
        f"Attention maps are {missing}: they need a model that takes token ids, and --text FILE": not kept,
        f"With {count:,} heads, only the first {kept} of {tokens} tokens are included; the JSON has all": few,
        f"Token directions are {missing}: use --directions 4; the checkpoint must contain embeddings": not described,
        f"With {count:,} heads, spectra are cut to their {OUTERMOST} outermost values; the JSON has all": cut,
        f"{cross} cross-attention heads have {pairwise}; the triangle leaves them out": crossed(look),
        f"{cross} cross-attention heads have no shares on data; their bars are omitted": without,
    }
    roles, data = (look.provenance.get(of) or {} for of in ("roles", "data"))
    said = [note for note, holds in notes.items() if holds] + [*roles.get("notes", []), *(rule(roles) if roles else [])]
    return versioned([*said, *([data["note"]] if "note" in data else [])], look.provenance)


# Layers


def _layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The selected layer."""
    about = [str(layer["name"]), *(["causal"] if layer.get("causal") else []), *layer.get("notes", [])]
    raw = {name: value for name, value in layer["raw"].items() if isinstance(value, (int, float))}
    return {"about": " · ".join(about), "blocks": [{"type": "together", "raw": short(raw, 5)}, {"type": "members"}]}


def _kept(look: Look, tokens: int) -> int:
    """The number of sample tokens that fit: small maps of all heads are preferred to large maps of a few."""
    heads = sum("scores" in head for head in look.heads)
    if not heads:
        return 0
    space = min(max(MAPS_A_HEAD * heads, MIN_MAPS), MAX_MAPS) / heads
    numbers = int(space / (4 / 3 * (1 + len(PARTS))))  # per map: one byte per number, 4/3 characters per byte
    causal = all(row.get("causal") for row in look.layers)
    fit = (math.isqrt(8 * numbers + 1) - 1) // 2 if causal else math.isqrt(numbers)
    return min(tokens, max(fit, 4))
