"""The job of a survey's workers: look at one model, and write its page, its JSON, its fingerprint and its record.

All are written or none; a repeated job writes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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
SCHEMA = 5  # of records

# heads, query, key, config and layout, as `read` takes them
Read = tuple[int | None, str | None, str | None, str | None, str | None]
Facts = dict[str, Any]
Files = dict[str | Path, str | bytes]


class SharedFolderError(OSError):
    """A worker does not see the survey's folder, or another survey writes to it."""


@dataclass(frozen=True)
class Job:
    """A model to look at; small, since it is sent to a worker."""

    entry: Entry
    out: str
    token: str  # the mark of the run: suffix of its temporary file names, and last line of the manifest
    versions: tuple[tuple[str, str], ...]
    read: Read = (None, None, None, None, None)
    threads: int = 1

    @property
    def record(self) -> Path:
        """The file that marks the model as finished."""
        return Path(self.out, "records", f"{self.entry.key}.json")


@dataclass(frozen=True)
class Written:
    """Digests of the page, the JSON and the fingerprint of a model as they were written."""

    file: str
    page: str
    json: str
    fingerprint: str | None  # None for a model without self-attention

    def files(self, out: str | Path) -> dict[Path, str]:
        """The paths in a survey's folder, and their digests."""
        models = Path(out, "models")
        files = {models / f"{self.file}.html": self.page, models / f"{self.file}.json": self.json}
        prints = Path(out, "fingerprints", f"{self.file}.safetensors")
        return files if self.fingerprint is None else {**files, prints: self.fingerprint}

    def remove(self, out: Path) -> None:
        """Delete these files, unless they have changed since."""
        for path, digest in self.files(out).items():
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


def _measured(job: Job) -> tuple[Facts, Files]:
    """The files of a model; none if they are there, and no measurement if only its name has changed."""
    source, (heads, query, key, config, layout) = job.entry.source, job.read
    stamp = _stamp(source, job.read, job.versions)
    done = _done(job, stamp)
    was = None if done is None else Written(**done["written"])
    if done is None or was is None:
        options: dict[str, Any] = {"heads": heads, "query": query, "key": key, "config": config, "layout": layout}
        look = look_at(source, name=job.entry.name, workers=job.threads, **options)
    else:
        same = (was.file, done["model"]["name"]) == (job.entry.file, job.entry.name)
        if same and all(path.is_file() for path in was.files(job.out)):
            return {}, {}
        old = Reading.load(Path(job.out, "models", f"{was.file}.json"))
        assert isinstance(old, Look)
        look = replace(old, model={**old.model, "name": job.entry.name})
    weights = read(opened(source), *job.read)
    contents: list[str | bytes] = [look.page(), look.to_json() + "\n"]
    if any(row["kind"] == "self" for row in look.layers):
        contents.append(packed(replace(fingerprint(weights), name=job.entry.name)))
    parameters = sum(math.prod(shape) for shape in weights.source.shapes.values())
    if _stamp(source, job.read, job.versions) != stamp:
        raise ValueError(f"{source} changed during the survey: run the same command again to measure it")
    digests = [*map(_digest, contents), None]
    written = Written(job.entry.file, str(digests[0]), str(digests[1]), digests[2])
    files: Files = dict(zip(written.files(job.out), contents, strict=True))
    record = {"stamp": stamp, "written": asdict(written), "model": {**_summary(look), "parameters": parameters}}
    # The record that marks the model as finished is renamed last.
    files[job.record] = json.dumps({**record, "heads": _columns(look)}, allow_nan=False)
    return {} if was is None else {"was": was}, files


def _done(job: Job, stamp: str) -> dict[str, Any] | None:
    """The record of the model in its present state, if its JSON still exists and is unchanged."""
    try:
        record: dict[str, Any] = json.loads(job.record.read_text(encoding="utf-8"))
        text = Path(job.out, "models", f"{record['written']['file']}.json").read_bytes()
    except (OSError, ValueError):
        return None
    return record if record["stamp"] == stamp and _digest(text) == record["written"]["json"] else None


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
