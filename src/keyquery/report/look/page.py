"""A look or a comparison as a self-contained HTML page, which opens offline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keyquery.checkpoints.labels import family_of
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.compare import Comparison
from keyquery.instruments.look.reading import Look
from keyquery.pages.colours import role_tones
from keyquery.pages.document import document
from keyquery.pages.packing import pack, pack_bytes
from keyquery.reading import short
from keyquery.report.look import triangle
from keyquery.report.look.figure import looks_of
from keyquery.report.look.shares import OF_DATA, OF_WEIGHTS, crossed, has_data, sample_of, window
from keyquery.report.roles.page import role_data, role_facts
from keyquery.report.roles.rule import rule

SCRIPTS = ("elements.js", "role_scores.js", "overview.js", "map.js", "changes.js", "head.js", "table.js", "page.js")
TOKENS, DIRECTIONS = 24, 4  # sample tokens and directions per head that a look measures for its page
DIGITS = 7  # of scalar metrics; fewer are shown
KNOWN = ("reason", "evidence", "properties")  # fields that belong to a label
LEAST, NAMED = 0.005, 3  # smallest interaction that is listed, and how many are
# Bytes for the score maps: per head, at least (all tokens of 144 causal heads), and at most (1,024 heads below 5 MB).
MAPS_A_HEAD, LEAST_MAPS, MOST_MAPS = 2600, 374_000, 1_100_000
MANY = 400  # heads above which only the outermost values of a spectrum are kept
OUTERMOST = 64


def look_page(reading: Look | Comparison) -> str:
    """The page of a look, or of the looks of a comparison, as HTML."""
    looks = looks_of(reading)
    changes = [_change(change) for change in reading.changes] if isinstance(reading, Comparison) else []
    data = {"units": dict(Look.units), "models": [_model(look) for look in looks], "changes": changes}
    data |= role_facts()
    title = " and ".join(str(look.model["name"]) for look in looks)
    triangles = "".join(triangle.inline(look, named=len(looks) > 1) for look in looks)
    return document("page", title, SCRIPTS, data, own_style=triangle.STYLE + role_tones(), triangles=triangles)


def _model(look: Look) -> dict[str, Any]:
    tokens = list((look.sample or {}).get("tokens", []))
    kept, data = _kept(look, len(tokens)), look.provenance.get("data") or {}
    columns = {view: _scalars(look.heads, view) for view in ("raw", "folded", "on_data")}
    causal = {row["layer"]: bool(row.get("causal")) for row in look.layers}
    return {
        "name": look.model["name"],
        "facts": _facts(look),
        "summary": dict(look.summary),
        "of": f"{OF_DATA}, {window(look)}" if has_data(look) else OF_WEIGHTS,
        "longest": data.get("longest", data.get("length")),
        "labels": list(look.model.get("labels") or []),
        "columns": columns,
        "layers": [{**row, "raw": short(row["raw"], DIGITS)} for row in look.layers],
        "heads": [_head(head, columns, causal[head["layer"]], kept, len(look.heads)) for head in look.heads],
        "tokens": tokens[:kept],
        "caveats": list((look.sample or {}).get("notes", [])),
        "cut": len(tokens) if kept < len(tokens) else 0,
        "notes": _notes(look, len(tokens), kept),
    }


def _change(change: Mapping[str, Any]) -> dict[str, Any]:
    """The change of each head as a list: layer, head, change, symmetric, skew and folded."""
    names = ("layer", "head", "change", "symmetric", "skew", "folded")
    rows = None if change["rows"] is None else [short([row[name] for name in names], 4) for row in change["rows"]]
    counts = {kind: len(tensors) for kind, tensors in change["tensors"].items()}
    return {**{name: change.get(name) for name in ("of", "from", "why", "notes")}, "rows": rows, "tensors": counts}


def _head(
    head: Mapping[str, Any], columns: Mapping[str, list[str]], causal: bool, kept: int, count: int
) -> dict[str, Any]:
    figures = {
        view: None if head[view] is None else [short(head[view].get(name), DIGITS) for name in names]
        for view, names in columns.items()
    }
    out = {key: head[key] for key in ("layer", "head", "kind", "scale", "rank", "label", *KNOWN) if key in head}
    spectra = {view: _spectra(head[view], count) for view in ("raw", "folded")}
    out |= {**figures, "spectra": spectra}
    intervals = {view: (head[view] or {}).get("intervals") for view in columns}
    if any(intervals.values()):
        out["intervals"] = {
            view: [short(ends.get(name), 3) for name in columns[view]] for view, ends in intervals.items() if ends
        }
    if "offsets" in head["raw"]:
        out["offsets"] = short(head["raw"]["offsets"], 4)
    if "objects" in head:  # as lists, since field names would take as much space as the tokens
        out["objects"] = [short([each["value"], each["tokens"], each["opposite"]], 4) for each in head["objects"]]
        out["relations"] = [short([each["value"], each["pairs"]], 4) for each in head["relations"]]
    if "corpus" in head:
        out["corpus"] = short(head["corpus"], 3)
    if "roles" in head:
        out["roles"] = role_data(head["roles"])
    if head["on_data"]:
        out |= _window(head["on_data"])
    if "lengths" in head:
        names = (*PARTS, "interaction", "symmetry")
        out["lengths"] = [
            short([row["length"], *((row[name], row["intervals"].get(name)) for name in names)], 3)
            for row in head["lengths"]
        ]
    if "ablation" in head:
        out["off"] = short(head["ablation"], 3)
    if kept and "scores" in head:
        out["maps"] = _maps(head["scores"], causal, kept)
    return out


def _window(data: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics that change with the window length, and the largest interactions."""
    out: dict[str, Any] = {}
    if data.get("changes_with_window"):
        out |= {"changes": data["changes_with_window"], "half": short(data["half_window"]["symmetry"], 3)}
    pairs = sorted(data.get("interactions", {}).items(), key=lambda pair: -abs(pair[1]))
    if pairs := [[name, short(value, 3)] for name, value in pairs[:NAMED] if abs(value) >= LEAST]:
        out["between"] = pairs
    return out


def _scalars(heads: Sequence[Mapping[str, Any]], view: str) -> list[str]:
    """The names of a view's scalar metrics, in order; some heads may lack some of them."""
    items = (item for head in heads for item in (head[view] or {}).items())
    return list(dict.fromkeys(name for name, value in items if isinstance(value, (int, float))))


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
    versions = look.provenance.get("versions", {})
    return [note for note, holds in notes.items() if holds] + [f"keyquery {versions.get('keyquery', '')}".strip()]
