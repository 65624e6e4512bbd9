"""The jobs of a survey's workers: open a model, measure one of its layers, and join its layers.

Each job leaves a record in the survey's folder, written completely or not at all; a repeated job writes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from keyquery.checkpoints import Heads, read
from keyquery.checkpoints.hub import located
from keyquery.checkpoints.labels import family_of
from keyquery.instruments.lineage.fingerprint import fingerprint
from keyquery.instruments.lineage.index import packed
from keyquery.instruments.look.fitted import saved_network
from keyquery.instruments.look.look import look_at_layer, whole_look
from keyquery.instruments.look.reading import Look
from keyquery.reading import Reading, provenance
from keyquery.support.files import read_bytes, write_all
from keyquery.support.printable import first_line
from keyquery.survey.find_models import WEIGHTS, Entry

# Columns of the table of heads: scalar metrics of a head in each view, and its place in the model.
FIGURES = (
    "symmetry",
    "column_directionality",
    "column_directionality_norms",
    "symmetric_energy",
    "skew_energy",
    "positive_share",
    "effective_rank",
    "stable_rank",
)
PLACE = ("layer", "head", "name", "kind", "scale", "rank")
VIEWS = ("raw", "folded")
HERE = "here"  # the manifest of runs, in `records`: one mark per line, with which their temporary file names end
SCHEMA = 4  # of records

CHANGED = "{} changed during the survey: run the same command again to measure it"
RECORD = re.compile(r"layer-\d{4,}-[0-9a-f]{16}\.json|whole-[0-9a-f]{16}\.json")

# heads, query, key, config and layout, as `read` takes them
Read = tuple[int | None, str | None, str | None, str | None, str | None]
Files = dict[str | Path, str | bytes]


class SharedFolderError(OSError):
    """A worker does not see the survey's folder, or another survey writes to it."""


@dataclass(frozen=True)
class Job:
    """A unit of work; small, since it is sent to a worker."""

    kind: str  # "open", "layer" or "join"
    entry: Entry
    out: str
    token: str  # the mark of the run: suffix of its temporary file names, and last line of the manifest
    versions: tuple[tuple[str, str], ...]
    read: Read = (None, None, None, None, None)
    stamp: str = ""
    layer: int = -1

    @property
    def folder(self) -> Path:
        """The folder of its model's records."""
        return Path(self.out, "records", self.entry.key)

    @property
    def models(self) -> Path:
        """The folder of pages and JSON files."""
        return Path(self.out, "models")

    @property
    def fingerprint(self) -> Path:
        """The file of its model in the index of fingerprints."""
        return Path(self.out, "fingerprints", f"{self.entry.file}.safetensors")


@dataclass(frozen=True)
class Written:
    """Digests of the page, the JSON and the fingerprint of a model as they were written."""

    file: str
    page: str
    json: str
    fingerprint: str | None  # None for a model without self-attention

    def remove(self, out: Path) -> None:
        """Delete these files, unless they have changed since."""
        models = out / "models"
        files = {
            models / f"{self.file}.html": self.page,
            models / f"{self.file}.json": self.json,
            out / "fingerprints" / f"{self.file}.safetensors": self.fingerprint,
        }
        for path, digest in files.items():
            if path.is_file() and _digest(path.read_bytes()) == digest:
                path.unlink()


def perform(job: Job) -> dict[str, Any]:
    """Do a job and return a few facts; a model that cannot be read is reported there, not raised."""
    _check_worker(job)
    try:
        with _one_thread():
            facts, files = {"open": _open, "layer": _layer, "join": _join}[job.kind](job)
    except Exception as error:  # a bad file must not stop the others
        return {"broken": _sentence(error)}
    if files:
        job.folder.mkdir(exist_ok=True)
        write_all(files, job.token)
    if job.kind == "join" and not facts.get("again"):
        _tidy(job)
    return facts


def _open(job: Job) -> tuple[dict[str, Any], Files]:
    """The number of layers, which of them are missing, and whether the model is finished."""
    job = replace(job, stamp=_stamp(job.entry.source, job.read, job.versions))
    heads, _ = _opened(job.entry.source, job.read, job.stamp, job.token)
    done = _done(job)
    facts = {"stamp": job.stamp, "layers": len(heads), "missing": [], "joined": False}
    if done is not None:
        paged = (job.models / f"{job.entry.file}.html").is_file()
        paged = paged and (done["written"]["fingerprint"] is None or job.fingerprint.is_file())
        same = (done["written"]["file"], done["model"]["name"]) == (job.entry.file, job.entry.name)
        return {**facts, "joined": paged and same}, {}
    recorded = set(os.listdir(job.folder)) if job.folder.is_dir() else set()
    missing = [index for index in range(len(heads)) if _record(job, index).name not in recorded]
    return {**facts, "missing": missing}, {}


def _layer(job: Job) -> tuple[dict[str, Any], Files]:
    """Measure one layer; only its tensors are read from the checkpoint."""
    _check_stamp(job)
    heads, tensors = _opened(job.entry.source, job.read, job.stamp, job.token)
    layer = heads[job.layer]
    row, cells = look_at_layer(layer, heads)
    # `tensors` may include those of other layers that this worker has read; the union over layers is complete.
    record = {"width": layer.form.dim, "row": row, "cells": cells, "tensors": dict(tensors)}
    return {"heads": len(cells)}, {_record(job, job.layer): json.dumps(record, allow_nan=False)}


def _join(job: Job) -> tuple[dict[str, Any], Files]:
    """Combine all layers into one look: its JSON, its page, its summary for the survey; and the model's fingerprint."""
    done = _done(job)
    if done is None:
        _check_stamp(job)
        heads, _ = _opened(job.entry.source, job.read, job.stamp, job.token)
        layers, bad = _records(job, len(heads))
        if bad:
            return {"again": bad}, {}
        model = {**heads.model, "width": layers[0]["width"], "name": job.entry.name}
        tensors = {name: digest for layer in layers for name, digest in layer["tensors"].items()}
        _check_stamp(job)
        look = whole_look(model, ((layer["row"], layer["cells"]) for layer in layers), tensors)
        parameters = sum(math.prod(shape) for shape in heads.source.shapes.values())
    else:  # only the name of the model has changed, or a file is missing
        heads, _ = _opened(job.entry.source, job.read, job.stamp, job.token)
        old = Reading.load(job.models / f"{done['written']['file']}.json")
        assert isinstance(old, Look)
        look, parameters = replace(old, model={**old.model, "name": job.entry.name}), done["model"]["parameters"]
    page, text = look.page(), look.to_json() + "\n"
    whole = _fingerprint(job, heads) if any(row["kind"] == "self" for row in look.layers) else None
    written = asdict(Written(job.entry.file, _digest(page), _digest(text), None if whole is None else _digest(whole)))
    kept = {"written": written, "model": {**_summary(look), "parameters": parameters}}
    files: Files = {job.models / f"{job.entry.file}.html": page, job.models / f"{job.entry.file}.json": text}
    files |= {} if whole is None else {job.fingerprint: whole}
    # The record that marks the model as finished is renamed last.
    files[_whole(job.folder, job.stamp)] = json.dumps({**kept, "heads": _columns(look)}, allow_nan=False)
    return {"heads": len(look.heads), "was": done and Written(**done["written"])}, files


def _fingerprint(job: Job, heads: Heads) -> bytes:
    """What `keyquery lineage --index` keeps of the model."""
    return packed(replace(fingerprint(heads), name=job.entry.name))


def _check_stamp(job: Job) -> None:
    source = job.entry.source
    if os.path.isabs(source) and not os.path.exists(source):
        raise FileNotFoundError(f"{source} no longer exists")
    if _stamp(source, job.read, job.versions) != job.stamp:
        raise ValueError(CHANGED.format(source))


def _records(job: Job, count: int) -> tuple[list[dict[str, Any]], list[int]]:
    """The records of the layers, and the indices of those that are unreadable, as after a machine crash."""
    records, bad = [], []
    for index in range(count):
        try:
            records.append(json.loads(_record(job, index).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            bad.append(index)
    return records, bad


def _tidy(job: Job) -> None:
    """Delete the records of layers, and outdated records, once a model is joined."""
    keep = _whole(job.folder, job.stamp)
    for path in list(job.folder.iterdir()):
        if path != keep and RECORD.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _done(job: Job) -> dict[str, Any] | None:
    """The summary of the model in its present state, if its JSON still exists and is unchanged."""
    try:
        kept = kept_of(job.folder, job.stamp)
        text = (job.models / f"{kept['written']['file']}.json").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return kept if _digest(text) == kept["written"]["json"] else None


def kept_of(folder: Path, stamp: str) -> dict[str, Any]:
    """The summary that a joined model leaves for the survey: one row, and the columns of its heads."""
    kept: dict[str, Any] = json.loads(_whole(folder, stamp).read_text(encoding="utf-8"))
    return kept


def _whole(folder: Path, stamp: str) -> Path:
    return folder / f"whole-{stamp}.json"


def _record(job: Job, layer: int) -> Path:
    return job.folder / f"layer-{layer:04}-{job.stamp}.json"


@lru_cache(maxsize=2)
def _opened(source: str, how: Read, stamp: str, token: str) -> tuple[Heads, dict[str, str]]:
    """The heads of a model, opened once per run and worker, and the digests of the tensors read so far."""
    network = saved_network(source)
    heads = read(source, *how) if network is None else read(network)
    return heads, heads.recorded()


def _stamp(source: str, how: Read, versions: Sequence[Any]) -> str:
    """A hash that identifies valid records: the state of the model's files, reader options, and library versions."""
    path = located(source)
    config = None if how[3] is None else read_bytes(how[3])
    files = sorted(path.iterdir()) if path.is_dir() else [path, path.parent / "config.json"]
    facts: list[list[Any]] = []
    for file in files:
        weights = file.suffix in WEIGHTS or file.name == "config.json" or file.name.endswith(".index.json")
        if weights and file.is_file():
            status = file.stat()
            facts.append([file.name, status.st_size, status.st_mtime_ns])
            if file.suffix == ".json":  # small, so identified by its content: each worker reads it itself
                with file.open("rb") as content:
                    facts[-1].append(hashlib.file_digest(content, "sha256").hexdigest())
    state = [SCHEMA, source, facts, [*how[:3], how[4]], config and hashlib.sha256(config).hexdigest(), versions]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def _summary(look: Look) -> dict[str, Any]:
    """A model in one row, with metrics per layer for curves over depth."""
    by_layer = {row["layer"]: [h for h in look.heads if h["layer"] == row["layer"]] for row in look.layers}
    causal = {bool(row["causal"]) for row in look.layers if row["kind"] == "self"}
    notes = sorted({note for row in look.layers for note in row.get("notes", [])})
    symmetry = sorted(head["raw"]["symmetry"] for head in look.heads)
    return {
        **{name: look.model.get(name) for name in ("name", "model_type", "layers", "heads", "width")},
        "family": family_of(look.model),
        "attention": "both" if len(causal) == 2 else "causal" if causal == {True} else "bidirectional",
        "symmetry": fmean(symmetry),
        "symmetry_folded": fmean(head["folded"]["symmetry"] for head in look.heads),
        "symmetry_low": symmetry[len(symmetry) // 4],
        "symmetry_high": symmetry[-1 - len(symmetry) // 4],
        "symmetry_together": median(row["raw"]["symmetry"] for row in look.layers),
        "column_directionality": median(row["raw"]["column_directionality"] for row in look.layers),
        "rank_used": fmean(head["raw"]["effective_rank"] / head["rank"] for head in look.heads),
        "labels": dict(sorted(look.summary.items())),
        "by_layer": [fmean(head["raw"]["symmetry"] for head in heads) for heads in by_layer.values()],
        "together_by_layer": [row["raw"]["symmetry"] for row in look.layers],
        "notes": notes,
    }


def _columns(look: Look) -> dict[str, list[Any]]:
    """The heads as columns: their places, scalar metrics and labels, as in the records of a look."""
    heads = sorted(look.heads, key=lambda head: (head["layer"], head["head"]))
    causal = {row["layer"]: row["causal"] for row in look.layers}
    columns: dict[str, list[Any]] = {name: [head[name] for head in heads] for name in PLACE}
    columns["causal"] = [causal[head["layer"]] for head in heads]
    for view in VIEWS:
        columns |= {f"{view}_{name}": [head[view][name] for head in heads] for name in FIGURES}
    columns |= {name: [head[name] for head in heads] for name in ("label", "evidence")}
    return {**columns, "properties": [", ".join(head["properties"]) for head in heads]}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, so that sums are added in the same order regardless of the worker's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_worker(job: Job) -> None:
    ours, versions = dict(job.versions), provenance()["versions"]
    if different := [name for name in ours if versions.get(name) != ours[name]]:
        name = different[0]
        raise SharedFolderError(
            f"a worker has {name} {versions.get(name)}, the survey {ours[name]}: versions must be the same"
        )
    try:
        marks = Path(job.out, "records", HERE).read_text(encoding="utf-8").split()
    except OSError:
        marks = []
    if marks[-1:] != [job.token]:
        why = "another survey is writing to it" if marks else "a worker cannot find it"
        raise SharedFolderError(f"{job.out} must be a folder shared by this survey and all its workers: {why}")


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (
        text
        if text and isinstance(error, (OSError, TypeError, ValueError))
        else f"{type(error).__name__}: {first_line(error)}"
    )
