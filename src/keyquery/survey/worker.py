"""The job of a survey's workers: look at one model, and write its page, its JSON, its fingerprint and its record.

All are written or none; a repeated job writes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from keyquery.checkpoints import read
from keyquery.checkpoints.hub import located
from keyquery.checkpoints.labels import family_of
from keyquery.instruments.lineage.fingerprint import fingerprint
from keyquery.instruments.lineage.index import packed
from keyquery.instruments.look.look import look as look_at
from keyquery.instruments.look.look import opened
from keyquery.instruments.look.reading import Look
from keyquery.reading import provenance
from keyquery.support.files import read_bytes, write_all
from keyquery.support.printable import first_line
from keyquery.survey.find_models import WEIGHTS, Entry
from keyquery.survey.parquet import columns_of

HERE = "here"  # the manifest of runs, in `records`: one mark per line, with which their temporary file names end
SCHEMA = 6  # of records

Facts = dict[str, Any]


class SharedFolderError(OSError):
    """A worker does not see the survey's folder, or another survey writes to it."""


@dataclass(frozen=True, eq=False)
class Job:
    """A model to look at; small, since it is sent to a worker."""

    entry: Entry
    out: str
    token: str  # the mark of the run: suffix of its temporary file names, and last line of the manifest
    versions: tuple[tuple[str, str], ...]
    read: Mapping[str, Any] = field(default_factory=dict)  # options of `kq.read`
    threads: int = 1

    @property
    def record(self) -> Path:
        """The file that marks the model as finished."""
        return Path(self.out, "records", f"{self.entry.key}.json")


def files_of(name: str) -> list[str]:
    """The page, the JSON and the fingerprint of a model, in a survey's folder."""
    return [f"models/{name}.html", f"models/{name}.json", f"fingerprints/{name}.safetensors"]


def remove(folder: Path, written: Mapping[str, str]) -> None:
    """Delete files by their names and digests, unless they have changed since."""
    for path, digest in ((folder / name, digest) for name, digest in written.items()):
        if path.is_file() and _digest(path.read_bytes()) == digest:
            path.unlink()


def perform(job: Job) -> Facts:
    """Do a job; a model that cannot be read is reported, not raised, and so are its files of a former name."""
    _check_worker(job)
    try:
        with _one_thread():
            facts, files = _measured(job)
    except Exception as error:  # a bad file must not stop the others
        return {"broken": _sentence(error)}
    write_all(files, job.token)
    return facts


def _measured(job: Job) -> tuple[Facts, dict[str | Path, str | bytes]]:
    """The files of a model; none if they are there."""
    entry, folder, stamp = job.entry, Path(job.out), _stamp(job)
    try:
        record: dict[str, Any] = json.loads(job.record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = {}
    before: dict[str, str] = record.get("written", {})
    if record.get("stamp") == stamp and all((folder / name).is_file() for name in before):
        name = f"models/{entry.file}.json"
        if _digest((folder / name).read_bytes()) == before[name]:
            return {}, {}
    look = look_at(entry.source, name=entry.name, workers=job.threads, **job.read)
    weights = read(opened(entry.source), **job.read)
    contents: list[str | bytes] = [look.page(), look.to_json() + "\n"]
    if any(row["kind"] == "self" for row in look.layers):
        contents.append(packed(replace(fingerprint(weights), name=entry.name)))
    if _stamp(job) != stamp:
        raise ValueError(f"{entry.source} changed during the survey: run the same command again to measure it")
    files = dict(zip(files_of(entry.file), contents, strict=False))
    parameters = sum(math.prod(shape) for shape in weights.source.shapes.values())
    content = {
        "stamp": stamp,
        "written": {name: _digest(content) for name, content in files.items()},
        "model": {**_summary(look), "parameters": parameters},
        "heads": columns_of(look),
    }
    # The record that marks the model as finished is renamed last.
    paths: dict[str | Path, str | bytes] = {folder / name: content for name, content in files.items()}
    paths[job.record] = json.dumps(content, allow_nan=False)
    return {"former": {name: digest for name, digest in before.items() if name not in files}}, paths


def _stamp(job: Job) -> str:
    """A hash that identifies valid records: the state of the model's files, names, options, and library versions."""
    path, config = located(job.entry.source), job.read.get("config")
    files = sorted(path.iterdir()) if path.is_dir() else [path, path.parent / "config.json"]
    facts: list[list[Any]] = []
    for file in files:
        weights = file.suffix in WEIGHTS or file.name == "config.json" or file.name.endswith(".index.json")
        if weights and file.is_file():
            status = file.stat()
            facts.append([file.name, status.st_size, status.st_mtime_ns])
            if file.suffix == ".json":  # small, so identified by its content: each worker reads it itself
                facts[-1].append(_digest(file.read_bytes()))
    content = None if config is None else _digest(read_bytes(config))
    entry = job.entry
    state = [SCHEMA, entry.source, entry.name, entry.file, facts, {**job.read, "config": content}, job.versions]
    return _digest(json.dumps(state))[:16]


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
