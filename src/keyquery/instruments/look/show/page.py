"""The page of a look, which opens offline: its point in sentences, the map of heads, and all of one head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from keyquery.checkpoints.labels import family_of
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show import triangle
from keyquery.instruments.look.show.heads import MANY, OUTERMOST, charts, item
from keyquery.instruments.look.show.measures import (
    VIEWS,
    costs_of,
    frame_of,
    label_tone,
    labelled,
    part_names,
    part_tones,
)
from keyquery.instruments.look.show.shares import (
    CHANGES,
    OF_DATA,
    OF_WEIGHTS,
    crossed,
    has_data,
    mean_shares,
    sample_of,
    window,
    with_bars,
)
from keyquery.instruments.roles.show import role_name, rule
from keyquery.pages.components import column, key_of, versioned
from keyquery.pages.document import document
from keyquery.reading import short
from keyquery.support.printable import counted

TOKENS, DIRECTIONS = 24, 4  # sample tokens and directions per head that a look measures for its page
# Bytes for the score maps: per head, at least (all tokens of 144 causal heads), and at most (1,024 heads below 5 MB).
MAPS_A_HEAD, LEAST_MAPS, MOST_MAPS = 2600, 374_000, 1_100_000


def page(reading: Look) -> str:
    """The page of a look."""
    pictures = [triangle.inline(reading, named=False)]
    tab = tab_of(reading, 0)
    name = str(reading.model["name"])
    return document(name, "attention heads", [tab], notes=[], figures=pictures, style=triangle.STYLE)


def tab_of(look: Look, picture: int) -> dict[str, Any]:
    """Everything that a page says of one look; its triangle is the page's picture of that number."""
    tokens = list((look.sample or {}).get("tokens", []))
    kept = _kept(look, len(tokens))
    frame = frame_of(look)
    keys = [one["key"] for one in frame["measures"]]
    quick = [key for key in ("cost", "parts", "role", *(f"{view}.symmetry" for view in VIEWS)) if key in keys]
    blocks: list[dict[str, Any]] = [
        summary_of(look),
        {"type": "map", "place": "seven", "quick": quick, "side": side_of(look)},
        {"type": "triangle", "place": "five", "picture": picture},
        {
            "type": "detail",
            "items": [item(head, look, kept) for head in look.heads],
            "blocks": charts(look, frame, kept),
            "hints": {CHANGES: "differs in the first half of each window"},
        },
        {"type": "items", "columns": [column("label", [labelled(head) for head in look.heads])]},
    ]
    state = {"at": key_of(opened(look)), "map": quick[0], "view": "raw"}
    rows = {str(layer["layer"]): _layer(layer, look) for layer in look.layers}
    texts = {"name": str(look.model["name"]), "facts": _facts(look), "notes": _notes(look, len(tokens), kept)}
    return {**texts, "frame": frame, "state": state, "rows": rows, "blocks": blocks, "tokens": tokens[:kept]}


def opened(look: Look) -> Mapping[str, Any]:
    """The head that a page opens on: the costliest, else that in which the contents of tokens matter most."""

    def weight(head: Mapping[str, Any]) -> tuple[float, float]:
        data = head["on_data"] or {}
        content = data.get("symmetric", 0.0) + data.get("skew", 0.0) if data else abs(head["raw"]["symmetry"]) - 2
        return max((mean for mean, *_ in costs_of(head).values()), default=-1.0), content

    return max(look.heads, key=weight)


def summary_of(look: Look) -> dict[str, Any]:
    """The point of a look in sentences, and its labels."""
    shares = mean_shares(with_bars(look))
    listed = ", ".join(
        f"{part} {share:.0%}" for part, share in zip(part_names(look), shares, strict=False) if share >= 0.005
    )
    of = "score variance on data" if has_data(look) else "‖M‖² of the weights"
    sentences = [f"Shares of {of}, mean over heads: {listed}."]
    if costs := _costliest(look):
        sentences.insert(0, costs)
    evidence = {"measured": "by measured costs", "estimated": "by estimated costs", "weights": "from the weights only"}
    known = dict.fromkeys(evidence[head["evidence"]] for head in look.heads if head.get("evidence") in evidence)
    tags = [{"value": count, "name": label, "tone": label_tone(label)} for label, count in look.summary.items()]
    note = f"labels of {counted(len(look.heads), 'head')}, {'; '.join(known)}"
    return {"type": "summary", "sentences": sentences, "tags": tags, "note": note}


def _costliest(look: Look, count: int = 3) -> str:
    """The heads that cost most to lose, with what they do and need."""
    rows = [(max(cost[0] for cost in costs.values()), head) for head in look.heads if (costs := costs_of(head))]
    described = []
    for cost, head in sorted(rows, key=lambda row: -row[0])[:count]:
        role = (head.get("roles") or {}).get("role")
        doing = f", {role_name(role)}" if role else ""
        needs = head["reason"] if head.get("needs") else f"{cost:+.2g} nats per token"
        described.append(f"{key_of(head)}{doing}: {needs}")
    return f"Costliest heads: {'; '.join(described)}." if described else ""


def side_of(look: Look) -> dict[str, Any]:
    """The mean shares of every layer, as bars beside the map."""
    names, tones = part_names(look), part_tones(look)
    by_layer = []
    for layer in sorted({head["layer"] for head in look.heads}):
        heads = [head for head in with_bars(look) if head["layer"] == layer]
        by_layer.append(mean_shares(heads) if heads else [0.0] * len(names))
    series = [
        {"name": name, "tone": tone, "values": short([shares[i] if i < len(shares) else 0.0 for shares in by_layer], 3)}
        for i, (name, tone) in enumerate(zip(names, tones, strict=True))
    ]
    return {"name": "mean per layer", "stacked": True, "series": series}


# The selected layer


def _layer(layer: Mapping[str, Any], look: Look) -> dict[str, Any]:
    about = [str(layer["name"]), *(["causal"] if layer.get("causal") else []), *layer.get("notes", [])]
    raw = {name: value for name, value in layer["raw"].items() if isinstance(value, (int, float))}
    metrics = [
        column("metric", [name.replace("_", " ") for name in raw]),
        column("raw", list(raw.values()), form="signed"),
    ]
    note = "the summed QK matrix of the layer, M = Σ M_h, raw"
    together = {"type": "table", "size": "third", "title": "All heads together", "note": note, "columns": metrics}
    heads = {
        "type": "members",
        "size": "rest",
        "title": "Heads",
        "note": _of(look),
        "measures": ["parts", "raw.symmetry"],
    }
    return {"about": " · ".join(about), "blocks": [together, heads]}


def _of(look: Look) -> str:
    return f"{OF_DATA}, {window(look)}" if has_data(look) else OF_WEIGHTS


def _kept(look: Look, tokens: int) -> int:
    """The number of sample tokens that fit: small maps of all heads are preferred to large maps of a few."""
    heads = sum("scores" in head for head in look.heads)
    if not heads:
        return 0
    space = min(max(MAPS_A_HEAD * heads, LEAST_MAPS), MOST_MAPS) / heads
    numbers = int(space / (4 / 3 * (1 + len(PARTS))))  # per map: one byte per number, 4/3 characters per byte
    causal = all(row.get("causal") for row in look.layers)
    fit = (math.isqrt(8 * numbers + 1) - 1) // 2 if causal else math.isqrt(numbers)
    return min(tokens, max(fit, 4))


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
    count, missing = len(look.heads), "not in this page"
    cross = sum(head["kind"] == "cross" for head in look.heads)
    longest = max(len(head["raw"]["eigenvalues"]) for head in look.heads)
    notes = {
        f"Shares on data are {missing}: keyquery look MODEL --text FILE --html page.html": not has_data(look),
        f"Attention maps are {missing}: they need a model that takes token ids, and --text FILE.": not kept,
        f"With {count:,} heads, only the first {kept} of {tokens} tokens are included; the JSON has all.": 0
        < kept
        < tokens,
        f"Token directions are {missing}: use --directions 4; the checkpoint must contain embeddings.": all(
            "objects" not in head for head in look.heads
        ),
        f"With {count:,} heads, spectra are cut to their {OUTERMOST} outermost values; the JSON has all.": (
            count > MANY and longest > OUTERMOST
        ),
        f"{cross} cross-attention heads have no shares on data; their bars are omitted.": cross > 0
        and has_data(look)
        and not crossed(look),
        f"{cross} cross-attention heads have a pairwise part instead of symmetric and skew, since contents of two "
        "sequences cannot be swapped; the triangle leaves them out.": crossed(look),
    }
    roles = look.provenance.get("roles") or {}
    notes |= {f"{note[:1].upper()}{note[1:]}.": True for note in roles.get("notes", [])}
    notes |= dict.fromkeys(rule(roles), True) if roles else {}
    few = (look.provenance.get("data") or {}).get("note")
    notes |= {f"{few}.": True} if few else {}
    return versioned([note for note, holds in notes.items() if holds], look.provenance)
