"""The catalogue of an index: short random projections of every head, in one file, so that a search reads only that.

It is a cache: built from the fingerprints, brought up to date where they have changed, rebuilt if it cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int8
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from keyquery.instruments.lineage.fingerprint import SKETCH, Fingerprint
from keyquery.support.files import writing
from keyquery.support.progress import Progress, silent

NAME = "catalogue.cache"
FORMAT = "keyquery-lineage-catalogue-1"
SHORT = 64  # numbers per head and kind
STEPS = 300.0  # of an 8-bit number, for unit vectors of that length
PROBES = 24  # heads of the model that are compared with all heads of the catalogue
CHUNK = 2**17  # heads


@dataclass(frozen=True, eq=False)
class Row:
    """A model of the catalogue."""

    file: str  # its fingerprint, in the folder of the catalogue
    stamp: str  # size and time of that file
    width: int
    dim: int
    gaps: int  # per spectrum
    side: int  # of the sketch
    heads: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What projections depend on."""
        return self.width, self.dim, self.gaps, self.side


@dataclass(frozen=True, eq=False)
class Catalogue:
    """Models, and the projections of their heads one after the other."""

    rows: Sequence[Row]
    gaps: Int8[Tensor, "heads short"]
    sketch: Int8[Tensor, "heads short"]

    def nearest(self, whole: Fingerprint, count: int) -> tuple[list[int], int]:
        """The rows most similar to a model by either kind, and how many have a width in common with it."""
        scores = {kind: np.full(len(self.rows), -np.inf) for kind in ("gaps", "sketch")}
        starts = np.cumsum([0, *(row.heads for row in self.rows)])
        for shape in sorted({row.shape for row in self.rows}):
            alike = [i for i, row in enumerate(self.rows) if row.shape == shape]
            for kind, pair in _probes(whole, *shape).items():
                for part in _parts(alike, starts):
                    heads = getattr(self, kind)[starts[part[0]] : starts[part[-1] + 1]]
                    scores[kind][part] = _excess(heads, starts[part] - starts[part[0]], pair)
        comparable = np.isfinite(np.stack(list(scores.values()))).any(0)
        chosen: dict[int, None] = {}
        for values in scores.values():
            best = np.argsort(-values, kind="stable")[:count]
            chosen |= dict.fromkeys(best[np.isfinite(values[best])].tolist())
        return list(chosen), int(comparable.sum())


def catalogue_of(prints: Iterable[Fingerprint]) -> Catalogue:
    """Of fingerprints in memory."""
    entries = [_entry("", "", whole) for whole in prints]
    return _joined(entries)


def catalogue(
    folder: Path, files: Sequence[Path], unpack: Callable[[Path], Fingerprint], progress: Progress = silent
) -> tuple[Catalogue, list[str]]:
    """Of the fingerprints in a folder, kept there if it can be written to; and why some could not be read.

    `unpack` reads a fingerprint.
    """
    kept = _kept(folder / NAME)
    entries, skipped, changed = [], [], False
    for path in progress(files, "reading the index", len(files)):
        status = path.stat()
        stamp = f"{status.st_size} {status.st_mtime_ns}"
        known = kept.get(path.name)
        if known is None or known[0].stamp != stamp:
            try:
                known, changed = _entry(path.name, stamp, unpack(path)), True
            except ValueError as error:
                skipped.append(str(error))
                continue
        entries.append(known)
    whole = _joined(entries)
    if changed or len(kept) != len(entries):
        _write(folder / NAME, whole)
    return whole, skipped


Entry = tuple[Row, Tensor, Tensor]


def _entry(file: str, stamp: str, whole: Fingerprint) -> Entry:
    first = whole.layers[0]
    gaps, side = first.gaps.shape[-1], round(first.sketch.shape[-1] ** 0.5)
    row = Row(file, stamp, first.width, first.dim, gaps, side, whole.heads)
    parts = (torch.cat([getattr(layer, kind) for layer in whole.layers]) for kind in ("gaps", "sketch"))
    shapes = ((4, gaps), (side, side))
    short = [_short(part.flatten(1), *shape) for part, shape in zip(parts, shapes, strict=True)]
    of_gaps, of_sketch = ((rows * STEPS).round().clamp(-127, 127).to(torch.int8) for rows in short)
    return row, of_gaps, of_sketch


def _joined(entries: Sequence[Entry]) -> Catalogue:
    empty = torch.zeros(0, SHORT, dtype=torch.int8)
    gaps = torch.cat([empty, *(entry[1] for entry in entries)])
    sketch = torch.cat([empty, *(entry[2] for entry in entries)])
    return Catalogue([entry[0] for entry in entries], gaps, sketch)


def _short(features: Float[Tensor, "heads features"], rows: int, columns: int) -> Float[Tensor, "heads short"]:
    """Unit vectors of random projections; of features that form a grid, since an index may keep fewer columns."""
    most = 4096
    draw = torch.Generator().manual_seed(rows * most + columns)
    projection = torch.randn(rows * columns, SHORT, generator=draw)
    return torch.nn.functional.normalize(features.float() @ projection, dim=-1)


def _probes(whole: Fingerprint, width: int, dim: int, gaps: int, side: int) -> dict[str, Float[Tensor, "probes short"]]:
    """Some heads of the model and as many of a null, projected as the heads of a shape are; none if widths differ."""
    first, found = whole.layers[0], dict[str, Tensor]()
    pick = torch.linspace(0, whole.heads - 1, min(PROBES, whole.heads)).round().long()
    kept = min(gaps, first.gaps.shape[-1])
    if first.width == width and kept == gaps:
        own = torch.cat([layer.gaps for layer in whole.layers])[pick][..., :gaps]
        both = torch.cat((own, own.flip(-1).roll(gaps // 2, -1)))
        found["gaps"] = _short(both.flatten(1), 4, gaps)
    if first.dim == dim:
        cells = torch.cat([torch.stack((layer.sketch, layer.permuted[0]), 1) for layer in whole.layers])[pick]  # type: ignore[index]
        grid = cells.unflatten(-1, (SKETCH, SKETCH))[..., :side, :side].flatten(-2)
        found["sketch"] = _short(grid.transpose(0, 1).flatten(0, 1), side, side)
    return found


def _parts(alike: Sequence[int], starts: np.ndarray) -> list[list[int]]:
    """Runs of neighbouring models, of at most `CHUNK` heads if one model does not have more."""
    parts: list[list[int]] = []
    for i in alike:
        if parts and i == parts[-1][-1] + 1 and starts[i + 1] - starts[parts[-1][0]] <= CHUNK:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def _excess(heads: Int8[Tensor, "heads short"], starts: np.ndarray, probes: Tensor) -> Float[np.ndarray, " models"]:
    """Mean best cosine of the probes less that of the null, per model."""
    cosines = (heads.float() @ (probes.T / STEPS)).numpy()
    best = np.maximum.reduceat(cosines, starts, axis=0)
    own, null = np.split(best, 2, axis=1)
    difference: np.ndarray = own.mean(1) - null.mean(1)
    return difference


def _write(path: Path, whole: Catalogue) -> None:
    rows = json.dumps([list(vars(row).values()) for row in whole.rows])
    try:
        with writing(path) as file:
            save_file({"gaps": whole.gaps, "sketch": whole.sketch}, file, {"format": FORMAT, "rows": rows})
    except OSError:  # a folder that cannot be written to can still be searched
        return


def _kept(path: Path) -> Mapping[str, Entry]:
    """The models of the catalogue as it was written; none where it is missing or damaged."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            parts = [file.get_tensor(kind) for kind in ("gaps", "sketch")]
        rows = [Row(*values) for values in json.loads(facts["rows"])]
        heads = [row.heads for row in rows]
        if facts["format"] != FORMAT or any(part.shape != (sum(heads), SHORT) for part in parts):
            return {}
        split = (part.split(heads) for part in parts)
        return {row.file: (row, gaps, sketch) for row, gaps, sketch in zip(rows, *split, strict=True)}
    except (SafetensorError, KeyError, TypeError, ValueError):
        return {}
