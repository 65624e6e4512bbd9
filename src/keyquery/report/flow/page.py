"""One self-contained HTML page of flow: layers by heads, and for one head what looks at what across modalities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keyquery.instruments.flow.flow import Flow
from keyquery.instruments.flow.modality import IMAGE
from keyquery.reading import short
from keyquery.report.kit.packed_numbers import pack
from keyquery.report.kit.page import document

SCRIPTS = ("elements.js", "flow.js")
HEADS = 24  # whose maps a page asks for
DIGITS = 5


def flow_page(reading: Flow) -> str:
    """The page; maps of single heads are in it where the reading kept them (`keep`).

    >>> flow_page(kq.flow(torch.full((4, 4), 0.25), ["a", "a", "b", "b"], keep=1))[:15]
    '<!doctype html>'
    """
    seen = reading.picture is not None
    return document("flow", str(reading.model["name"]), SCRIPTS, _data(reading), "flow", images=seen)


def grid(reading: Flow, values: Any) -> np.ndarray:
    """Figures of a reading as layers by heads, texts averaged; what is missing is NaN.

    >>> reading = kq.flow(torch.full((2, 4, 4), 0.25), ["a", "a", "b", "b"])
    >>> grid(reading, reading.raw).shape
    (1, 2)
    """
    found = np.asarray(values, dtype=np.float64)
    found = found.mean(tuple(range(1, found.ndim - 1))) if found.ndim > 2 else found
    return found.reshape(reading.model.get("layers", 1), -1)


def views(reading: Flow) -> dict[str, np.ndarray]:
    """What can be seen of each head, layers by heads: above chance, but for reciprocity."""
    found = {"flow": grid(reading, reading.corrected)}
    if reading.net is not None:
        found["net of sinks"] = grid(reading, reading.of("net", corrected=True))
    for (source, target), share in reading.directed_of("raw", corrected=True).items():
        if source != target:
            found[f"{source} → {target}"] = grid(reading, share)
    if reading.weighted is not None:
        found["norm-weighted"] = grid(reading, reading.of("weighted", corrected=True))
    back = grid(reading, reading.reciprocity)
    return found if np.isnan(back).all() else found | {"reciprocity": back}


def depths(reading: Flow) -> list[list[float]]:
    """Of each layer: the mean of raw, its chance, the rollout up to it, and that of chance."""

    def by_layer(values: Any, count: int) -> np.ndarray:
        return np.asarray(values, dtype=np.float64).reshape(count, -1).mean(1)

    layers = len(grid(reading, reading.raw))
    both = [values for name in ("raw", "rollout") for values in (reading.of(name), reading.chance_of(name))]
    return np.stack([by_layer(values, layers) for values in both], 1).tolist()


def _data(reading: Flow) -> dict[str, Any]:
    seen = {name: [[None if np.isnan(one) else one for one in row] for row in rows] for name, rows in _plain(reading)}
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
        "maps": [_map(one) for one in reading.maps],
        "picture": _picture(reading),
        "notes": _notes(reading),
    }


def _plain(reading: Flow) -> list[tuple[str, list[list[float]]]]:
    return [(name, values.tolist()) for name, values in views(reading).items()]


def _map(kept: Mapping[str, Any]) -> dict[str, Any]:
    blocks = [{"from": one["from"], "to": one["to"], "map": pack(one["map"])} for one in kept["blocks"]]
    return {"layer": kept["layer"], "head": kept["head"], "blocks": blocks}


def _picture(reading: Flow) -> dict[str, Any] | None:
    if reading.picture is None or reading.labels.count(IMAGE) != len(reading.picture["places"]):
        return None
    return {**reading.picture, "modality": IMAGE}


def _facts(reading: Flow) -> str:
    model = reading.model
    facts = [f"{model['layers']} layers"] if "layers" in model else []
    facts += [f"{model['heads']} heads"]
    for name, count in reading.counts.items():
        told = count if isinstance(count, int) else f"{min(count)} to {max(count)}"
        out = "" if name in reading.modalities else ", left out"
        facts.append(f"{told} tokens {name}{out}")
    return " · ".join(facts)


def _notes(reading: Flow) -> list[str]:
    kept, heads = len(reading.maps), grid(reading, reading.raw).size
    said = [f"{note[:1].upper()}{note[1:]}." for note in reading.notes]
    if kept < heads:
        some = f"of the {kept} heads furthest above chance, net of sinks" if kept else "of no head"
        said.append(f"Maps across modalities are {some}, marked by a dot; keep (--keep N) asks for more.")
    if IMAGE in reading.modalities and _picture(reading) is None and kept:
        said.append("Where the patches lie in the image is not known: they are shown by their number.")
    versions = reading.provenance.get("versions", {})
    return [*said, f"keyquery {versions.get('keyquery', '')}".strip()]
