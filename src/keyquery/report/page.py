"""One self-contained HTML page of a look or a comparison: it opens offline and asks nothing of anyone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from keyquery.estimators.reranking import Reranking
from keyquery.instruments.causes import Causes
from keyquery.instruments.comparison import Comparison
from keyquery.instruments.flow import Flow
from keyquery.instruments.geometry import Look
from keyquery.instruments.transport import Transport
from keyquery.reading import Reading, short
from keyquery.report import triangle
from keyquery.report.flow_page import flow_page
from keyquery.report.graph_page import graph_page
from keyquery.report.moves_page import moves_page
from keyquery.report.packed import pack
from keyquery.report.picture import looks_of
from keyquery.report.shell import document
from keyquery.report.survey_page import survey_page
from keyquery.report.transport_page import transport_page
from keyquery.survey.answers import Survey

SCRIPTS = ("elements.js", "overview.js", "map.js", "changes.js", "head.js", "table.js", "page.js")
TOKENS, DIRECTIONS = 24, 4  # of the sample, and of each head, that a page asks a look for
DIGITS = 7  # of single figures; fewer are shown
# Bytes: room for the score maps of 144 rotary heads, and at most what keeps 1,024 heads below 5 MB.
MAPS_A_HEAD, MAPS = 3300, 1_100_000
MANY = 400  # heads, from which on only the outermost values of a spectrum are kept
OUTERMOST = 64


# Kinds of readings with a page of their own; looks and comparisons share one.
OWN: dict[type[Reading], Callable[[Any], str]] = {
    Causes: graph_page,
    Flow: flow_page,
    Reranking: moves_page,
    Survey: survey_page,
    Transport: transport_page,
}
PAGED = (Look, Comparison, *OWN)


def page(reading: Reading) -> str:
    """The page of a look, of the looks of a comparison, of causal graphs, flow, paths, lists or a survey, as HTML.

    >>> page(kq.look(torch.nn.MultiheadAttention(8, 2), name="two heads"))[:15]
    '<!doctype html>'
    """
    if type(reading) in OWN:
        return OWN[type(reading)](reading)
    looks = looks_of(reading)
    changes = [_change(one) for one in reading.changes] if isinstance(reading, Comparison) else []
    data = {"units": dict(Look.units), "models": [_model(look) for look in looks], "changes": changes}
    title = " and ".join(str(look.model["name"]) for look in looks)
    triangles = "".join(triangle.inline(look, heading=len(looks) > 1) for look in looks)
    return document("page", title, SCRIPTS, data, own_style=triangle.STYLE, triangles=triangles)


def frame(reading: Reading) -> str:
    """The page in a frame of its own, as a notebook shows it: neither can touch the other."""
    facts = 'width="100%" height="760" frameborder="0" sandbox="allow-scripts"'
    return f'<iframe {facts} title="{escape(reading.kind)}" srcdoc="{escape(page(reading))}"></iframe>'


def _model(look: Look) -> dict[str, Any]:
    tokens = list((look.sample or {}).get("tokens", []))
    kept = _kept(look, len(tokens))
    columns = {view: _scalars(look.heads, view) for view in ("raw", "folded", "on_data")}
    causal = {row["layer"]: bool(row.get("causal")) for row in look.layers}
    return {
        "name": look.model["name"],
        "facts": _facts(look),
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
    """How far heads moved, as lists: layer, head, change, symmetric, skew and folded."""
    names = ("layer", "head", "change", "symmetric", "skew", "folded")
    rows = None if change["rows"] is None else [short([row[name] for name in names], 4) for row in change["rows"]]
    tensors = {name: len(found) for name, found in change["tensors"].items()}
    return {**{name: change.get(name) for name in ("of", "from", "why", "notes")}, "rows": rows, "tensors": tensors}


def _head(
    head: Mapping[str, Any], columns: Mapping[str, list[str]], causal: bool, kept: int, count: int
) -> dict[str, Any]:
    figures = {
        view: None if head[view] is None else [short(head[view].get(name), DIGITS) for name in names]
        for view, names in columns.items()
    }
    out = {key: head[key] for key in ("layer", "head", "kind", "scale", "rank", "verdict", "reason")}
    spectra = {view: _spectra(head[view], count) for view in ("raw", "folded")}
    out |= {**figures, "spectra": spectra}
    intervals = {view: (head[view] or {}).get("intervals") for view in columns}
    if any(intervals.values()):
        out["intervals"] = {view: short(ends, 3) for view, ends in intervals.items() if ends}
    if "offsets" in head["raw"]:
        out["offsets"] = short(head["raw"]["offsets"], 4)
    if "objects" in head:  # as lists: the names of their fields would take as much room as the tokens
        out["objects"] = [short([each["value"], each["tokens"], each["opposite"]], 4) for each in head["objects"]]
        out["relations"] = [short([each["value"], each["pairs"]], 4) for each in head["relations"]]
    if "corpus" in head:
        out["corpus"] = short(head["corpus"], 3)
    if "ablation" in head:
        out["off"] = short(head["ablation"], 3)
    if kept and "scores" in head:
        out["maps"] = _maps(head["scores"], causal, kept)
    return out


def _scalars(heads: Sequence[Mapping[str, Any]], view: str) -> list[str]:
    """The names of a view's single figures, in their order; a head may lack one that others have."""
    found = (item for head in heads for item in (head[view] or {}).items())
    return list(dict.fromkeys(name for name, value in found if isinstance(value, (int, float))))


def _spectra(figures: Mapping[str, Any], count: int) -> list[str]:
    """Of S, A and M; singular values of A come in pairs, and one of each is kept."""
    series = [figures["eigenvalues"], figures["skew_values"][::2], figures["singular_values"]]
    if count > MANY and len(series[0]) > OUTERMOST:
        series[0] = series[0][: OUTERMOST // 2] + series[0][-OUTERMOST // 2 :]
    return [pack(values[:OUTERMOST] if count > MANY else values) for values in series]


def _maps(scores: Mapping[str, Any], causal: bool, kept: int) -> list[str | None]:
    """Pairs, popularity and position of the first tokens; of the latter two only what a causal layer sees."""
    below = np.tril_indices(kept)
    packed: list[str | None] = [pack(np.asarray(scores["pairs"])[:kept, :kept])]
    for name in ("popularity", "position"):
        if scores[name] is None:
            packed.append(None)
            continue
        values = np.asarray(scores[name])
        square = values[:kept, :kept] if values.ndim == 2 else values[:kept]
        packed.append(pack(square[below] if values.ndim == 2 and causal else square))
    return packed


def _kept(look: Look, tokens: int) -> int:
    """How many tokens of the sample fit: a smaller map of every head says more than a large one of a few."""
    heads = [head for head in look.heads if "scores" in head]
    if not heads:
        return 0
    room = min(MAPS_A_HEAD * len(look.heads), MAPS) / len(heads)
    squares = 1 + sum(isinstance(part[0], list) for part in list(heads[0]["scores"].values())[1:] if part)
    # Two bytes a number, four letters for three bytes; causal maps are smaller, which is not relied on beyond half.
    each = 8 / 3 * (1 + (squares - 1) * (0.55 if look.layers[0].get("causal") else 1))
    return min(tokens, max(int((room / each) ** 0.5), 4))


def _facts(look: Look) -> str:
    model, data = look.model, look.provenance.get("data")
    facts = [f"{model['layers']} layers", f"{len(look.heads)} heads", f"width {model['width']}"]
    facts += [f"family {model['family']}"] if model.get("family") else []
    facts += [f"on {data['from']}, {data['tokens']:,} tokens" if data else "from the weights alone"]
    if look.corpus is not None:
        facts += [f"beside {look.corpus.get('from') or 'a corpus'}, {look.corpus['compared']} tokens"]
    return " · ".join([*facts, *([data["note"]] if data and data.get("note") else [])])


def _notes(look: Look, tokens: int, kept: int) -> list[str]:
    """What the page does not show, and how to get it."""
    count, missing = len(look.heads), "not in this page"
    cross = sum(head["kind"] == "cross" for head in look.heads)
    longest = max(len(head["raw"]["eigenvalues"]) for head in look.heads)
    said = {
        f"Shares on data are {missing}: keyquery look MODEL --text FILE --html page.html": not triangle.has_data(look),
        f"Attention on a text is {missing}: it needs a model that takes token ids, and --text FILE.": not kept,
        f"Only the first {kept} of {tokens} tokens are kept, for the size of {count:,} heads; the JSON has all.": 0
        < kept
        < tokens,
        f"Tokens along directions are {missing}: --directions 4, with the embeddings in the checkpoint.": all(
            "objects" not in head for head in look.heads
        ),
        f"Spectra are cut to their {OUTERMOST} outermost values, for the size of {count:,} heads; the JSON has all.": (
            count > MANY and longest > OUTERMOST
        ),
        f"{cross} heads of cross-attention have no split on data.": cross > 0 and triangle.has_data(look),
    }
    versions = look.provenance.get("versions", {})
    return [note for note, holds in said.items() if holds] + [f"keyquery {versions.get('keyquery', '')}".strip()]
