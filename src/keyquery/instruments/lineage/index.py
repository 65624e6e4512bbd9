"""An index of fingerprints: a folder with one small safetensors file per model, and its search."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int8
from safetensors import safe_open
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
PROBES = 32  # heads of the model that are compared with every model of an index
FULL = 20  # models of an index, by either kind of similarity, that are tested in full
FORMAT = "keyquery-lineage-1"


@dataclass(frozen=True, kw_only=True)
class Relatives(Reading, kind="lineage search"):
    """The models of an index that are nearest to a model, with both tests of each."""

    units: ClassVar[Mapping[str, str]] = {"basis_free, shared_basis": "standard deviations of the null"}

    model: str
    searched: int
    comparable: int  # models of the index with equal width of heads or of the residual stream
    rows: Sequence[Mapping[str, Any]]

    def records(self) -> list[dict[str, Any]]:
        """One row per model that was tested in full, the most similar first."""
        return [dict(row) for row in self.rows]


def packed(whole: Fingerprint) -> bytes:
    """A fingerprint in at most 200 kB: 8-bit numbers, and of large models fewer layers, gaps and cells.

    >>> heads = kq.read(kq.models.DECODER)
    >>> len(packed(fingerprint(heads))) < 20_000
    True
    """
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
    return save(tensors, {"format": FORMAT, "name": whole.name, "width": str(common), "digest": digest})


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
            facts, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts.get("format") != FORMAT:
            raise ValueError("another format")
        return _fingerprint(facts, tensors)
    except OSError:
        raise
    except Exception as error:  # a damaged or foreign file may be anything
        raise ValueError(f"{path} is not a fingerprint of `keyquery lineage --index`: {error}") from None


def index_files(folder: Path) -> list[Path]:
    """The fingerprints in a folder; none if it holds models."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return []
    with safe_open(files[0], "pt") as file:
        return files if (file.metadata() or {}).get("format") == FORMAT else []


def _fingerprint(facts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Fingerprint:
    table = tensors["layers"].tolist()
    sizes = [row[1] for row in table]
    gaps, sketch = tensors["gaps"].float().split(sizes), tensors["sketch"].float().split(sizes)
    planes = tensors["planes"].float().split(sizes) if "planes" in tensors else [None] * len(sizes)
    layers = [
        LayerPrint(index, dim, int(facts["width"]), *parts)
        for (index, _, dim), *parts in zip(table, gaps, planes, sketch, strict=True)
    ]
    return Fingerprint(facts["name"], layers, {"": facts["digest"]})


def among(model: Any, index: Iterable[Path | Fingerprint], progress: Progress | None = None) -> Relatives:
    """The relatives of a model among others.

    Every model of the index is compared by `PROBES` heads of the model; those nearest are tested in full.

    Parameters
    ----------
    model
        Whatever `kq.read` takes.
    index
        Files that `packed` wrote, or fingerprints.
    progress
        Progress display. Default: none.

    Returns
    -------
    Relatives
        p-values are adjusted by Bonferroni for the number of models that could be compared.
    """
    heads = model if isinstance(model, Heads) else read(model)
    whole = fingerprint(heads, PERMUTATIONS, progress)
    probes = _Probes(whole)
    files = list(index)
    scored: list[tuple[float, float, Path | Fingerprint]] = []
    for file in (progress or silent)(files, "searching", len(files)):
        other = file if isinstance(file, Fingerprint) else unpacked(file)
        free, shared = probes.scores(other)
        if free is not None or shared is not None:
            none = -torch.inf
            scored.append((none if free is None else free, none if shared is None else shared, file))
    nearest: dict[int, Path | Fingerprint] = {}
    for test in (0, 1):
        for *_, file in sorted(scored, key=lambda row: -(row[0], row[1])[test])[:FULL]:
            nearest[id(file)] = file
    rows = [_row(whole, file, len(scored)) for file in nearest.values()]
    rows.sort(key=lambda row: row["p"])
    facts = provenance(model=dict(heads.model), level=LEVEL)
    return Relatives(model=whole.name, searched=len(files), comparable=len(scored), rows=rows, provenance=facts)


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


class _Probes:
    """Some heads of a model, to be compared quickly with many others."""

    def __init__(self, whole: Fingerprint) -> None:
        layers = whole.layers
        self.width, self.dim = layers[0].width, layers[0].dim
        pick = torch.linspace(0, whole.heads - 1, min(PROBES, whole.heads)).round().long()
        self.gaps = torch.cat([layer.gaps for layer in layers])[pick]
        self.sketch = torch.cat([layer.sketch for layer in layers])[pick].unflatten(-1, (SKETCH, SKETCH))
        null = torch.cat([layer.permuted[0] for layer in layers])[pick]  # type: ignore[index]
        self.null = null.unflatten(-1, (SKETCH, SKETCH))

    def scores(self, other: Fingerprint) -> tuple[float | None, float | None]:
        """Mean best cosines less those of the null, of gaps and of sketches; None where widths differ."""
        free = shared = None
        if other.layers[0].width == self.width:
            kept = min(other.layers[0].gaps.shape[-1], self.gaps.shape[-1])
            own = self.gaps[..., :kept]
            both = torch.stack((own, own.flip(-1).roll(kept // 2, -1))).flatten(2)
            free = _excess(both, torch.cat([layer.gaps[..., :kept].flatten(1) for layer in other.layers]))
        if other.layers[0].dim == self.dim:
            theirs = torch.cat([layer.sketch for layer in other.layers])
            side = round(theirs.shape[-1] ** 0.5)
            both = torch.stack((self.sketch, self.null))[..., :side, :side].flatten(2)
            shared = _excess(both, theirs)
        return free, shared


def _excess(both: Float[Tensor, "2 probes features"], theirs: Float[Tensor, "heads features"]) -> float:
    unit = torch.nn.functional.normalize(both, dim=-1)
    cosines = unit @ theirs.T / theirs.norm(dim=-1).clamp(min=1e-30)
    best = cosines.amax(-1).mean(-1)
    return float(best[0] - best[1])
