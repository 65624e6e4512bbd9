"""Cross-modal attention flow in the terminal, as a figure and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keyquery.instruments.flow.flow import Flow
from keyquery.instruments.flow.modality import CLASS, IMAGE
from keyquery.pages.colours import LIGHT
from keyquery.pages.components import DIGITS, column, measure
from keyquery.pages.document import document
from keyquery.pages.packing import pack
from keyquery.pages.tables import Table, Text
from keyquery.reading import short
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional

HEADS = 24  # heads whose maps are kept for a page


def grid(reading: Flow, values: Any) -> np.ndarray:
    """Metrics of a reading as an array of layers by heads, averaged over texts; missing values are NaN."""
    array = np.asarray(values, dtype=np.float64)
    array = array.mean(tuple(range(1, array.ndim - 1))) if array.ndim > 2 else array
    return array.reshape(reading.model.get("layers", 1), -1)


def views(reading: Flow) -> dict[str, np.ndarray]:
    """Metrics of each head as layers by heads: flow above chance in several views, and reciprocity."""
    maps = {"flow": grid(reading, reading.corrected)}
    if reading.net is not None:
        maps["net of sinks"] = grid(reading, reading.of("net", corrected=True))
    for (source, target), share in reading.directed_of("raw", corrected=True).items():
        if source != target:
            maps[f"{source} → {target}"] = grid(reading, share)
    if reading.weighted is not None:
        maps["norm-weighted"] = grid(reading, reading.of("weighted", corrected=True))
    back = grid(reading, reading.reciprocity)
    return maps if np.isnan(back).all() else maps | {"reciprocity": back}


def depths(reading: Flow) -> list[list[float]]:
    """Per layer: mean raw flow, its null level, the rollout up to the layer, and its null level."""

    def by_layer(values: Any, count: int) -> np.ndarray:
        return np.asarray(values, dtype=np.float64).reshape(count, -1).mean(1)

    layers = len(grid(reading, reading.raw))
    both = [values for name in ("raw", "rollout") for values in (reading.of(name), reading.chance_of(name))]
    return np.stack([by_layer(values, layers) for values in both], 1).tolist()


LISTED = 8  # heads that are listed
SHOWN_LAYERS = 48  # layers that are shown


def lines(reading: Flow) -> list[Any]:
    """Title, token counts, a row per layer, and the strongest heads."""
    model = reading.model
    deep = f"{model['layers']} layers, " if "layers" in model else ""
    title = f"{model['name']}: {deep}{model['heads']} head{'s' if model['heads'] > 1 else ''}"
    counted = ", ".join(f"{reading.counts[name]} {name}" for name in reading.modalities)
    left = [f"{count} {name} excluded" for name, count in reading.counts.items() if name not in reading.modalities]
    lines: list[Any] = [Text(title, style="bold"), Text("; ".join([f"tokens: {counted}", *left]), style="dim"), ""]
    lines += [_layers(reading), "", *_heads(reading)]
    raw, chance = np.mean(reading.raw), np.mean(reading.chance_of("raw"))
    between = "Attention between class token and patches" if CLASS in reading.modalities else "Cross-modal attention"
    lines += ["", f"{between}: {raw:.1%} on average, {_points(raw - chance)} points relative to chance."]
    lines += [Text(_reciprocity(reading), style="dim")]
    return [*lines, *(f"Note: {note}." for note in reading.notes)]


def _layers(reading: Flow) -> Any:
    pairs = [pair for pair in reading.directed if pair[0] != pair[1]]
    several = len(pairs) <= 2
    table = Table(box=None, pad_edge=False, header_style="")
    names = ["layer", "flow", "chance", "above", *(f"{a} → {b}" for a, b in pairs if several)]
    weighted = reading.of("weighted", corrected=True)
    names += [*(["weighted above"] if weighted is not None else []), "rollout", "above"]
    for name in names:
        table.add_column(Text(name), justify="right")
    directions = [grid(reading, share).mean(1) for pair, share in reading.directed.items() if pair in pairs and several]
    norm_weighted = None if weighted is None else grid(reading, weighted).mean(1)
    for layer, (raw, chance, deep, far) in enumerate(depths(reading)[:SHOWN_LAYERS]):
        cells = [str(layer), f"{raw:.1%}", f"{chance:.1%}", _points(raw - chance)]
        cells += [f"{way[layer]:.1%}" for way in directions]
        cells += [] if norm_weighted is None else [_points(float(norm_weighted[layer]))]
        table.add_row(*cells, f"{deep:.1%}", _points(deep - far))
    return table


def _heads(reading: Flow) -> list[str]:
    seen = views(reading)
    values = seen.get("net of sinks", seen["flow"])
    order = np.argsort(-values, axis=None)[:LISTED]
    places = [divmod(int(place), values.shape[1]) for place in order]
    listed = ", ".join(f"{layer}.{head} {_points(float(values[layer, head]))}" for layer, head in places)
    net = ", net of sinks" if "net of sinks" in seen else ""
    return [f"Heads furthest above chance{net}, in points: {listed}."]


def _reciprocity(reading: Flow) -> str:
    back = grid(reading, reading.reciprocity)
    if np.isnan(back).all():
        return "Reciprocity is undefined: no pair of tokens can attend both ways, or attention does not vary."
    return f"Reciprocity, the correlation of attention i → j with j → i: {np.nanmean(back):+.2f} on average."


def _points(value: float) -> str:
    return f"{100 * value:+z.1f}"


def flow_map(reading: Flow, pyplot: Any, view: str = "flow") -> Any:
    """A map of heads in one view, and layer means and rollout against their null levels."""
    seen = views(reading)
    check_choice("view", view, tuple(seen))
    values, each = seen[view], np.array(depths(reading))
    rows, columns = values.shape
    size = (1.6 + max(0.22 * columns, 1.2) + 2.2, max(1.2 + 0.2 * rows, 2.2))
    figure, axes = pyplot.subplots(1, 2, figsize=size, layout="constrained", sharey=True, width_ratios=[1.3, 1])
    steps = [LIGHT["skew"], "#f2f4f6", LIGHT["symmetric"]]
    colours = optional("matplotlib.colors", "plot").LinearSegmentedColormap.from_list("flow", steps)
    scale = 1.0 if view == "reciprocity" else 100.0
    most = float(np.nanmax(np.abs(values))) * scale or 1.0
    image = axes[0].imshow(scale * values, vmin=-most, vmax=most, cmap=colours, aspect="auto")
    title = "reciprocity" if view == "reciprocity" else f"{view}, points above chance"
    axes[0].set(xlabel="head", ylabel="layer", title=title)
    axes[0].locator_params(integer=True, nbins=12)
    figure.colorbar(image, ax=axes[0], location="left", shrink=0.8, ticks=[-most, 0, most], format="%.2g")
    lines = ((0, "mean over heads", "#59636e"), (2, "rollout", LIGHT["popularity"]))
    for index, label, colour in lines:
        axes[1].plot(100 * each[:, index], range(rows), color=colour, marker="o", markersize=2.5, label=label)
        axes[1].plot(100 * each[:, index + 1], range(rows), color=colour, linestyle=":", linewidth=0.9)
    axes[1].set(xlabel="% cross-modal (dotted: chance)", xlim=(0, None))
    axes[1].legend(frameon=False, loc="best", fontsize=7)
    axes[1].spines[["top", "right"]].set_visible(False)
    figure.suptitle(str(reading.model["name"]), weight="bold")
    return figure


FIGURES = {"map": flow_map}


def page(reading: Flow) -> str:
    """The page, with maps of the heads for which the reading kept them (`keep`)."""
    measures = [_measure(reading, name, values) for name, values in views(reading).items()]
    shape = grid(reading, reading.raw).shape
    frame = {
        "rows": [str(layer) for layer in range(shape[0])],
        "columns": [str(head) for head in range(shape[1])],
        "measures": measures,
    }
    kept = {f"{value['layer']}.{value['head']}": value for value in reading.maps}
    keys = [f"{layer}.{head}" for layer in range(shape[0]) for head in range(shape[1])]
    records = reading.records() if len(reading.records()) == len(keys) else [{}] * len(keys)
    raw, chance, deep, far = (list(values) for values in zip(*depths(reading), strict=True))
    side = {
        "name": "per layer, 0 to 100 %",
        "form": "percent1",
        "series": [
            {"name": "mean over heads", "tone": "var(--muted)", "values": short(raw, DIGITS), "level": chance},
            {"name": "rollout", "tone": "var(--popularity)", "values": short(deep, DIGITS), "level": far},
        ],
    }
    blocks: list[dict[str, Any]] = [
        {"type": "summary", "sentences": _sentences(reading)},
        {
            "type": "map",
            "quick": list(views(reading)),
            "side": side,
            "dots": list(kept),
            "dotted": "its maps are in this page",
        },
        {
            "type": "detail",
            "items": [_detail(reading, kept.get(key), row) for key, row in zip(keys, records, strict=True)],
        },
        {"type": "items", "columns": _record_columns(records)},
    ]
    opened = next(iter(kept), None) or keys[int(np.nanargmax(grid(reading, reading.corrected)))]
    state = {"at": opened, "map": measures[0]["key"], "way": "", "token": "", "popular": ""}
    text = {"tokens": list(reading.tokens), "labels": list(reading.labels), "picture": _picture(reading)}
    tab = {"frame": frame, "state": state, "blocks": blocks, "text": text}
    name, seen = str(reading.model["name"]), reading.picture is not None
    return document(name, "cross-modal flow", [tab], _facts(reading), _notes(reading), images=seen)


def _measure(reading: Flow, name: str, values: np.ndarray) -> dict[str, Any]:
    numbers = [None if np.isnan(value) else float(value) for value in values.ravel()]
    if name == "reciprocity":
        ends, unit = ["one-way", "reciprocal"], str(Flow.units.get(name, ""))
        return measure(name, name, numbers, form="signed", unit=unit, ends=ends)
    return measure(name, name, numbers, form="points", unit="points above chance", ends=["below", "above chance"])


def _sentences(reading: Flow) -> list[str]:
    raw, chance, deep, far = (values for values in zip(*depths(reading), strict=True))
    mean, level = float(np.mean(raw)), float(np.mean(chance))
    between = "between class token and patches" if CLASS in reading.modalities else "cross-modal"
    return [
        f"{mean:.1%} of attention is {between}, {_points(mean - level)} points relative to chance.",
        f"In the rollout over all layers: {deep[-1]:.1%}, {_points(deep[-1] - far[-1])} points relative to chance.",
    ]


def _detail(reading: Flow, kept: Mapping[str, Any] | None, record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a head, and its attention across modalities if the reading kept it."""
    names = [name for name in record if name not in ("layer", "text", "head")]
    said = [f"{name.replace('_', ' ')} {_written(name, record[name])}" for name in names]
    blocks = [] if kept is None else [{"type": "modalities", "maps": _maps(reading, kept)}]
    about = "" if kept is not None else "The attention map of this head is not included in this page."
    return {"sentences": [" · ".join(said)], "about": about, "blocks": blocks}


def _written(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name.endswith("above_chance"):
        return f"{100 * value:+z.1f} points"
    return f"{value:+z.2f}" if name in ("symmetry", "reciprocity") else f"{value:.1%}"


def _maps(reading: Flow, kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The maps of a head between modalities; first those with attention, and of these those to an image."""
    everywhere = kept.get("popularity")  # none in older readings
    maps = []
    for block in sorted(kept["blocks"], key=lambda block: (not np.any(block["map"]), block["from"] != IMAGE)):
        here = zip(everywhere or [], reading.labels, strict=False)
        popularity = [value for value, label in here if label == block["from"]]
        known = popularity and None not in popularity
        more = {"popularity": short(popularity, DIGITS) if known else None}
        maps.append({"from": block["from"], "to": block["to"], "map": pack(block["map"]), **more})
    return maps


def _record_columns(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the table says of a head beyond the measures of the map."""
    names = [name for name in records[0] if name not in ("layer", "head")]
    return [column(name.replace("_", " "), [record[name] for record in records]) for name in names]


def _picture(reading: Flow) -> dict[str, Any] | None:
    if reading.picture is None or reading.labels.count(IMAGE) != len(reading.picture["places"]):
        return None
    return {**reading.picture, "modality": IMAGE}


def _facts(reading: Flow) -> str:
    model = reading.model
    facts = [f"{model['layers']} layers"] if "layers" in model else []
    facts += [f"{model['heads']} heads"]
    for name, count in reading.counts.items():
        number = count if isinstance(count, int) else f"{min(count)} to {max(count)}"
        out = "" if name in reading.modalities else ", excluded"
        facts.append(f"{number} {name} tokens{out}")
    return " · ".join(facts)


def _notes(reading: Flow) -> list[str]:
    kept, heads = len(reading.maps), grid(reading, reading.raw).size
    notes = [f"{note[:1].upper()}{note[1:]}." for note in reading.notes]
    if kept < heads:
        which = f"for the {kept} heads furthest above chance, net of sinks (marked by a dot)" if kept else "for no head"
        notes.append(f"Cross-modal maps are included {which}; use keep (--keep N) for more.")
    if IMAGE in reading.modalities and _picture(reading) is None and kept:
        notes.append("The positions of the patches in the image are unknown: patches are shown by number.")
    versions = reading.provenance.get("versions", {})
    return [*notes, f"keyquery {versions.get('keyquery', '')}".strip()]
