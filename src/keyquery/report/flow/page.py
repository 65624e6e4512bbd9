"""Flow as a self-contained HTML page: layers by heads, and for one head its attention across modalities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keyquery.instruments.flow.flow import Flow
from keyquery.instruments.flow.modality import IMAGE
from keyquery.pages.document import document
from keyquery.pages.packing import pack
from keyquery.reading import short

SCRIPTS = ("elements.js", "flow.js")
HEADS = 24  # heads whose maps are kept for a page
DIGITS = 5


def flow_page(reading: Flow) -> str:
    """The page, with maps of the heads for which the reading kept them (`keep`)."""
    seen = reading.picture is not None
    return document("flow", str(reading.model["name"]), SCRIPTS, _data(reading), "flow", images=seen)


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


def _data(reading: Flow) -> dict[str, Any]:
    seen = {
        name: [[None if np.isnan(value) else value for value in row] for row in rows] for name, rows in _plain(reading)
    }
    return {
        "name": reading.model["name"],
        "facts": _facts(reading),
        "units": dict(Flow.units),
        "modalities": list(reading.modalities),
        "views": short(seen, DIGITS),
        "layers": short(depths(reading), DIGITS),
        "records": short(reading.records(), DIGITS),
        "tokens": list(reading.tokens),
        "labels": list(reading.labels),
        "maps": [_map(value) for value in reading.maps],
        "picture": _picture(reading),
        "notes": _notes(reading),
    }


def _plain(reading: Flow) -> list[tuple[str, list[list[float]]]]:
    return [(name, values.tolist()) for name, values in views(reading).items()]


def _map(kept: Mapping[str, Any]) -> dict[str, Any]:
    blocks = [{"from": block["from"], "to": block["to"], "map": pack(block["map"])} for block in kept["blocks"]]
    popularity = short(kept.get("popularity"), DIGITS)  # none in older readings
    return {"layer": kept["layer"], "head": kept["head"], "blocks": blocks, "popularity": popularity}


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
