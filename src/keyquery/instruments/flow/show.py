"""Cross-modal attention flow in the terminal, as a figure and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keyquery.instruments.flow.counting import CLASS, IMAGE
from keyquery.instruments.flow.flow import Flow
from keyquery.pages.colours import LIGHT
from keyquery.pages.components import DIGITS, column, measure, versioned
from keyquery.pages.document import document
from keyquery.pages.figures import signed_map
from keyquery.pages.packing import pack
from keyquery.pages.tables import Text, columns_table
from keyquery.reading import short
from keyquery.support.checks import check_choice
from keyquery.support.printable import counted

HEADS = 24  # heads whose maps are kept for a page
LISTED = 8  # heads that are listed


def grid(reading: Flow, values: Any) -> np.ndarray:
    """Metrics of a reading as an array of layers by heads, averaged over texts; missing values are NaN."""
    array = np.asarray(values, dtype=np.float64)
    array = array.mean(tuple(range(1, array.ndim - 1))) if array.ndim > 2 else array
    return array.reshape(reading.model.get("layers", 1), -1)


def views(reading: Flow) -> dict[str, np.ndarray]:
    """Metrics of each head as layers by heads: flow above chance in several views, and reciprocity."""
    maps = {"flow": reading.corrected, "net of sinks": reading.of("net", corrected=True)}
    directed = reading.directed_of("raw", corrected=True)
    maps |= {f"{source} → {target}": share for (source, target), share in directed.items() if source != target}
    maps["norm-weighted"] = reading.of("weighted", corrected=True)
    grids = {name: grid(reading, values) for name, values in maps.items() if values is not None}
    back = grid(reading, reading.reciprocity)
    return grids if np.isnan(back).all() else grids | {"reciprocity": back}


def depths(reading: Flow) -> np.ndarray:
    """Per layer: mean raw flow, its null level, the rollout up to the layer, and its null level."""
    both = [values for name in ("raw", "rollout") for values in (reading.of(name), reading.chance_of(name))]
    layers = reading.model.get("layers", 1)
    return np.stack([np.reshape(values, (layers, -1)).mean(1) for values in both], 1)


def lines(reading: Flow) -> list[Any]:
    """A sentence, a row per layer, and the strongest heads."""
    table = columns_table("layer", "flow", "chance", "above", "rollout", "above")
    for layer, (raw, chance, deep, level) in enumerate(depths(reading)):
        values = (f"{raw:.1%}", f"{chance:.1%}", _points(raw - chance), f"{deep:.1%}", _points(deep - level))
        table.add_row(str(layer), *values)
    grids = views(reading)
    name = "net of sinks" if "net of sinks" in grids else "flow"
    order = np.argsort(-grids[name], axis=None)[:LISTED]
    heads = zip(*np.unravel_index(order, grids[name].shape), strict=True)
    listed = ", ".join(f"{layer}.{head} {_points(grids[name][layer, head])}" for layer, head in heads)
    return [
        Text(f"{reading.model['name']}: {_facts(reading)}", style="bold"),
        _mean(reading),
        "",
        table,
        "",
        f"Heads furthest above chance ({name}), in points: {listed}.",
        *(f"Note: {note}." for note in reading.notes),
    ]


def _mean(reading: Flow) -> str:
    raw, chance, _, _ = depths(reading).mean(0)
    between = "between class token and patches" if CLASS in reading.modalities else "cross-modal"
    return f"{raw:.1%} of attention is {between}, {_points(raw - chance)} points relative to chance."


def _facts(reading: Flow) -> str:
    model = reading.model
    facts = [counted(model["layers"], "layer")] if "layers" in model else []
    facts.append(counted(model["heads"], "head"))
    for name, count in reading.counts.items():
        number = count if isinstance(count, int) else f"{min(count)} to {max(count)}"
        facts.append(f"{number} {name} tokens{'' if name in reading.modalities else ', excluded'}")
    return " · ".join(facts)


def _points(value: float) -> str:
    return f"{100 * value:+z.1f}"


def flow_map(reading: Flow, pyplot: Any, view: str = "flow") -> Any:
    """A map of heads in one view, and layer means and rollout against their null levels."""
    grids = views(reading)
    check_choice("view", view, tuple(grids))
    values, by_layer = grids[view], depths(reading)
    rows, columns = values.shape
    size = (1.6 + max(0.22 * columns, 1.2) + 2.2, max(1.2 + 0.2 * rows, 2.2))
    figure, axes = pyplot.subplots(1, 2, figsize=size, layout="constrained", sharey=True, width_ratios=[1.3, 1])
    signed_map(axes[0], values if view == "reciprocity" else 100 * values, location="left", shrink=0.8)
    title = "reciprocity" if view == "reciprocity" else f"{view}, points above chance"
    axes[0].set(xlabel="head", ylabel="layer", title=title)
    axes[0].locator_params(integer=True, nbins=12)
    for index, label, colour in ((0, "mean over heads", "#59636e"), (2, "rollout", LIGHT["popularity"])):
        curve, level = 100 * by_layer[:, index], 100 * by_layer[:, index + 1]
        axes[1].plot(curve, range(rows), color=colour, marker="o", markersize=2.5, label=label)
        axes[1].plot(level, range(rows), color=colour, linestyle=":", linewidth=0.9)
    axes[1].set(xlabel="% cross-modal (dotted: chance)", xlim=(0, None))
    axes[1].legend(frameon=False, loc="best", fontsize=7)
    axes[1].spines[["top", "right"]].set_visible(False)
    figure.suptitle(str(reading.model["name"]), weight="bold")
    return figure


FIGURES = {"map": flow_map}


def page(reading: Flow) -> str:
    """The page, with maps of the heads for which the reading kept them (`keep`)."""
    measures = [_measure(name, values) for name, values in views(reading).items()]
    rows, columns = grid(reading, reading.raw).shape
    keys = [f"{layer}.{head}" for layer in range(rows) for head in range(columns)]
    kept = {f"{row['layer']}.{row['head']}": row for row in reading.maps}
    records = reading.records()
    names = [name for name in records[0] if name not in ("layer", "head")] if len(records) == len(keys) else []
    details = [
        {"about": "", "blocks": [{"type": "modalities", "maps": _maps(reading, kept[key])}]}
        if key in kept
        else {"about": "The attention map of this head is not included in this page."}
        for key in keys
    ]
    dots = {"dots": list(kept), "dotted": "its maps are in this page"}
    blocks: list[dict[str, Any]] = [
        {"type": "summary", "sentences": [_mean(reading)]},
        {"type": "map", "quick": list(views(reading)), "side": _side(reading), **dots},
        {"type": "detail", "items": details},
        {"type": "items", "columns": [column(n.replace("_", " "), [record[n] for record in records]) for n in names]},
    ]
    strongest = next(iter(kept), keys[int(np.nanargmax(grid(reading, reading.corrected)))])
    picture = {**reading.picture, "modality": IMAGE} if reading.picture else None
    axes = {"rows": list(map(str, range(rows))), "columns": list(map(str, range(columns)))}
    tab = {
        "frame": {**axes, "measures": measures},
        "state": {"at": strongest, "map": measures[0]["key"], "way": "", "token": "", "popular": ""},
        "blocks": blocks,
        "text": {"tokens": list(reading.tokens), "labels": list(reading.labels), "picture": picture},
    }
    notes = list(reading.notes)
    if len(kept) < len(keys):
        which = f"for the {len(kept)} heads furthest above chance (marked by a dot)" if kept else "for no head"
        notes.append(f"Cross-modal maps are included {which}; use keep (--keep N) for more.")
    if IMAGE in reading.modalities and picture is None and kept:
        notes.append("The positions of the patches in the image are unknown: patches are shown by number.")
    name, notes = str(reading.model["name"]), versioned(notes, reading.provenance)
    return document(name, "cross-modal flow", [tab], _facts(reading), notes, images=reading.picture is not None)


def _side(reading: Flow) -> dict[str, Any]:
    """Curves beside the map."""
    raw, chance, deep, level = short(depths(reading).T.tolist(), DIGITS)
    series = [
        {"name": "mean over heads", "tone": "var(--muted)", "values": raw, "level": chance},
        {"name": "rollout", "tone": "var(--popularity)", "values": deep, "level": level},
    ]
    return {"name": "per layer, 0 to 100 %", "form": "percent1", "series": series}


def _measure(name: str, values: np.ndarray) -> dict[str, Any]:
    numbers = [None if np.isnan(value) else float(value) for value in values.ravel()]
    if name == "reciprocity":
        return measure(name, name, numbers, form="signed", unit=Flow.units[name], ends=["one-way", "reciprocal"])
    return measure(name, name, numbers, form="points", unit="points above chance", ends=["below", "above chance"])


def _maps(reading: Flow, kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The maps of a head between modalities; first those with attention, and of these those to an image."""
    everywhere = kept.get("popularity") or []  # none in older readings
    maps = []
    for block in sorted(kept["blocks"], key=lambda block: (not np.any(block["map"]), block["from"] != IMAGE)):
        pairs = zip(everywhere, reading.labels, strict=False)
        popularity = [value for value, label in pairs if label == block["from"]]
        known = bool(popularity) and None not in popularity
        maps.append({**block, "map": pack(block["map"]), "popularity": short(popularity, DIGITS) if known else None})
    return maps
