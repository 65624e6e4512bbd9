"""An index of fingerprints: a folder with one small safetensors file per model, and its search."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Int8
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from keyquery.checkpoints import Heads, read
from keyquery.instruments.lineage.evidence import Evidence, basis_free, shared_basis
from keyquery.instruments.lineage.fingerprint import PERMUTATIONS, SKETCH, Fingerprint, LayerPrint, fingerprint
from keyquery.instruments.lineage.lineage import LEVEL
from keyquery.reading import Reading, provenance
from keyquery.support.progress import Progress, silent

BUDGET = 190_000  # bytes of a file
MOST = 1500  # heads; of larger models every second layer is kept, or every third, …
USEFUL = 15  # gaps per spectrum: rather than fewer, other parts are made smaller
STEPS = 30.0  # of an 8-bit number per standard deviation
PROBES = 24  # heads of the model by which an index is searched
FULL = 10  # models of an index, by either kind of similarity, that are tested in full
KEY = "keyquery_lineage"
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Relatives(Reading, kind="lineage search"):
    """The models of an index that are nearest to a model, with both tests of each."""

    units: ClassVar[Mapping[str, str]] = {"basis_free, shared_basis": "standard deviations of the null"}

    model: str
    searched: int
    comparable: int  # models of the index with equal width of heads or of the residual stream
    rows: Sequence[Mapping[str, Any]]
    skipped: Sequence[str] = ()  # why files of the index could not be read

    def records(self) -> list[dict[str, Any]]:
        """One row per model that was tested in full, the most similar first."""
        return [dict(row) for row in self.rows]


def packed(whole: Fingerprint) -> bytes:
    """A fingerprint in at most 200 kB: 8-bit numbers, and of large models fewer layers, gaps and cells."""
    widths = [layer.width for layer in whole.layers]
    common = max(set(widths), key=widths.count)
    layers = [layer for layer in whole.layers if layer.width == common]
    layers = layers[:: -(-sum(len(layer.gaps) for layer in layers) // MOST)]
    count, full = sum(len(layer.gaps) for layer in layers), layers[0].gaps.shape[-1]
    planes = 0 if any(layer.planes is None for layer in layers) else layers[0].planes.shape[-1]  # type: ignore[union-attr]
    side, kept, planes = _fitting(BUDGET // count, full, planes)
    sketch = torch.cat([layer.sketch.unflatten(-1, (SKETCH, SKETCH))[:, :side, :side] for layer in layers]).flatten(1)
    tensors = {
        "layers": torch.tensor([[layer.index, len(layer.gaps), layer.dim] for layer in layers], dtype=torch.int32),
        "gaps": _eight_bits(torch.cat([layer.gaps[..., :kept] for layer in layers])),
        "sketch": (sketch / sketch.abs().amax(1, keepdim=True).clamp(min=1e-30) * 127).round().to(torch.int8),
    }
    if planes:
        tensors["planes"] = _eight_bits(torch.cat([layer.planes for layer in layers]))  # type: ignore[misc]
    digest = hashlib.sha256("".join(sorted(whole.digests.values())).encode()).hexdigest()
    facts = {"format": FORMAT, "name": whole.name, "width": common, "digest": digest}
    return save(tensors, {KEY: json.dumps(facts)})  # one entry: safetensors writes several in a random order


def _fitting(room: int, gaps: int, planes: int) -> tuple[int, int, int]:
    """Side of the sketch, gaps per spectrum and planes that fit into so many bytes per head."""
    for side, kept in ((SKETCH, planes), (SKETCH // 2, planes), (SKETCH // 2, 0)):
        fitting = min(gaps, (room - side * side - kept) // 4)
        if fitting >= min(gaps, USEFUL):
            return side, fitting, kept
    return SKETCH // 4, max(min(gaps, (room - SKETCH) // 4), 1), 0


def _eight_bits(rows: Tensor) -> Int8[Tensor, "*shape"]:
    return (rows * STEPS).round().clamp(-127, 127).to(torch.int8)


def unpacked(path: str | Path) -> Fingerprint:
    """A fingerprint of an index."""
    try:
        with safe_open(path, "pt") as file:
            facts, tensors = _facts(file), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts.get("format") != FORMAT:
            raise ValueError("another format")
        return _fingerprint(facts, tensors)
    except OSError:
        raise
    except Exception as error:  # a damaged or foreign file may be anything
        raise ValueError(f"{path} is not a fingerprint of `keyquery lineage --index`: {error}") from None


def index_files(folder: Path) -> list[Path]:
    """The fingerprints in a folder; none if it holds models. Some of them may be damaged, but not all."""
    files, why = sorted(folder.glob("*.safetensors")), ""
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                return files if _facts(file).get("format") == FORMAT else []
        except (SafetensorError, ValueError) as error:
            why = why or f"{path} is not a readable safetensors file: {error}"
    if why:
        raise ValueError(why)
    return []


def _facts(file: Any) -> dict[str, Any]:
    """What `packed` says of a fingerprint; empty for another file."""
    facts = json.loads((file.metadata() or {}).get(KEY, "{}"))
    return facts if isinstance(facts, dict) else {}


def _fingerprint(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Fingerprint:
    table = tensors["layers"].tolist()
    sizes = [row[1] for row in table]
    gaps, sketch = tensors["gaps"].float().split(sizes), tensors["sketch"].float().split(sizes)
    planes = tensors["planes"].float().split(sizes) if "planes" in tensors else [None] * len(sizes)
    layers = [
        LayerPrint(index, dim, facts["width"], *parts)
        for (index, _, dim), *parts in zip(table, gaps, planes, sketch, strict=True)
    ]
    return Fingerprint(facts["name"], layers, {"": facts["digest"]})


def among(model: Any, index: Iterable[Path | Fingerprint], progress: Progress | None = None) -> Relatives:
    """The relatives of a model among others: all are compared by some heads, those nearest are tested in full."""
    heads = model if isinstance(model, Heads) else read(model)
    whole = fingerprint(heads, PERMUTATIONS, progress)
    entries, skipped, watch = list(index), list[str](), progress or silent
    nearness: dict[int, list[float]] = {}
    for number, entry in enumerate(watch(entries, "reading the index", len(entries))):
        try:
            nearness[number] = _nearness(whole, entry if isinstance(entry, Fingerprint) else unpacked(entry))
        except ValueError as error:
            skipped.append(str(error))
    comparable = sum(max(values) > -math.inf for values in nearness.values())
    nearest: dict[int, None] = {}
    for kind in (0, 1):
        best = sorted(nearness, key=lambda number, kind=kind: -nearness[number][kind])[:FULL]  # type: ignore[misc]
        nearest |= dict.fromkeys(number for number in best if nearness[number][kind] > -math.inf)
    rows = [_row(whole, entries[i], comparable) for i in watch(list(nearest), "testing the nearest", len(nearest))]
    return Relatives(
        model=whole.name,
        searched=len(nearness),
        comparable=comparable,
        rows=sorted(rows, key=lambda row: row["p"]),
        skipped=skipped,
        provenance=provenance(model=dict(heads.model), level=LEVEL),
    )


def _nearness(whole: Fingerprint, other: Fingerprint) -> list[float]:
    """How similar some heads are to another model's, by gaps and sketches, less a null; −∞ where widths differ."""
    first, their = whole.layers[0], other.layers[0]
    pick = torch.linspace(0, whole.heads - 1, min(PROBES, whole.heads)).round().long()
    kept, nearness = their.gaps.shape[-1], [-math.inf, -math.inf]
    if first.width == their.width and first.gaps.shape[-1] >= kept:
        gaps = torch.cat([layer.gaps for layer in whole.layers])[pick][..., :kept]
        nearness[0] = _excess(gaps, gaps.flip(-1).roll(kept // 2, -1), [layer.gaps for layer in other.layers])
    if first.dim == their.dim:
        layers = _as_small(whole, other).layers
        sketches, permuted = (torch.cat(side)[pick] for side in zip(*map(_sketches, layers), strict=True))
        nearness[1] = _excess(sketches, permuted, [layer.sketch for layer in other.layers])
    return nearness


def _sketches(layer: LayerPrint) -> tuple[Tensor, Tensor]:
    """The sketches of a layer, and those of the first permutation."""
    assert layer.permuted is not None
    return layer.sketch, layer.permuted[0]


def _excess(probes: Tensor, null: Tensor, heads: Sequence[Tensor]) -> float:
    sides = (torch.cat((probes, null)), torch.cat(list(heads)))
    ours, theirs = (torch.nn.functional.normalize(side.flatten(1).float(), dim=1) for side in sides)
    best = (ours @ theirs.T).amax(1)
    return float(best[: len(probes)].mean() - best[len(probes) :].mean())


def _row(whole: Fingerprint, file: Path | Fingerprint, compared: int) -> dict[str, Any]:
    other = file if isinstance(file, Fingerprint) else unpacked(file)
    # Tests are symmetric in the models; the null is of the model at hand, since an index keeps no permutations.
    free, shared = basis_free(other, whole), shared_basis(other, _as_small(whole, other))
    found: dict[str, Evidence | None] = {"basis_free": free, "shared_basis": shared}
    p = min(2 * compared * min(test.p for test in found.values() if test is not None), 1.0)
    return {
        "model": other.name,
        "file": None if isinstance(file, Fingerprint) else str(file),
        "p": p,
        "related": p < LEVEL,
        **{name: None if test is None else test.statistic for name, test in found.items()},
    }


def _as_small(whole: Fingerprint, other: Fingerprint) -> Fingerprint:
    """Sketches with as many cells as those of the other."""
    side = round(other.layers[0].sketch.shape[-1] ** 0.5)

    def corner(cells: Tensor) -> Tensor:
        return cells.unflatten(-1, (SKETCH, SKETCH))[..., :side, :side].flatten(-2)

    layers = [
        replace(layer, sketch=corner(layer.sketch), permuted=None if layer.permuted is None else corner(layer.permuted))
        for layer in whole.layers
    ]
    return replace(whole, layers=layers)
