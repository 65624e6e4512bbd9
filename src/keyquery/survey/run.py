"""Run a survey: from models to a folder of results."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from keyquery.reading import provenance
from keyquery.support.checks import check_count
from keyquery.support.extras import optional
from keyquery.support.files import MARK, append_line, regular, remove_temporaries, write_all
from keyquery.support.progress import Progress, silent
from keyquery.survey.executors import on_cluster, on_cores
from keyquery.survey.find_models import Entry, find_models
from keyquery.survey.parquet import arrow, write_rows
from keyquery.survey.reading import Survey, answer
from keyquery.survey.worker import HERE, Job, files_of, remove

FOLDERS = ("models", "records", "fingerprints")


def run(
    models: Iterable[str | Path],
    out: str | Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    heads: int | None = None,
    query: str | None = None,
    key: str | None = None,
    config: str | Path | None = None,
    layout: str | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Run `look` on many models, and write the results per model and for all of them into the folder `out`.

    `models` are folders, files, globs, text files that list these, hub names, and training runs with all their
    checkpoints. What is already recorded in `out` is reused, so that an interrupted survey resumes; its folder
    `fingerprints` is an index for `keyquery lineage --among`. `workers` are local processes (default: one per core; 1:
    this process), `scheduler` is the address of a Dask scheduler whose workers do the work instead, and `heads`,
    `query`, `key`, `config` and `layout` are as in `kq.read`, for all models.
    """
    arrow()
    entries = find_models(models)
    if workers is not None:
        check_count("workers", workers)
    if config is not None:
        regular(config)
    folder = Path(os.path.abspath(out))
    _check_own(folder, entries)
    if scheduler is not None:
        optional("distributed", "a scheduler")
    token = _prepare(folder)
    versions = tuple(provenance()["versions"].items())
    given = {"heads": heads, "query": query, "key": key, "config": config and os.path.abspath(config), "layout": layout}
    options = {name: value for name, value in given.items() if value is not None}
    cores = workers or os.cpu_count() or 1
    threads = max(cores // len(entries), 1) if scheduler is None else 1  # per model, where there are few
    jobs = [Job(entry, str(folder), token, versions, options, threads) for entry in entries]
    results = on_cores(jobs, min(cores, len(jobs))) if scheduler is None else on_cluster(jobs, scheduler)
    broken: dict[Entry, str] = {}
    former: dict[str, str] = {}  # files written under a model's former name, and their digests
    try:
        with closing(results):
            for job, facts in (progress or silent)(results, "measuring models", len(jobs)):
                broken |= {job.entry: facts["broken"]} if "broken" in facts else {}
                former |= facts.get("former", {})
        survey = _write(folder, token, jobs, broken)
    except BaseException:  # also on an interrupt or SIGTERM, leave no process and no temporary file
        remove_temporaries([token], _folders(folder))
        raise
    present = {name for entry in entries for name in files_of(entry.file)}
    remove(folder, {name: digest for name, digest in former.items() if name not in present})
    return survey


def _check_own(folder: Path, entries: Iterable[Entry]) -> None:
    """Refuse a folder in which results would replace files that were not written by a survey."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out must be a folder, but {folder} is a file")
    if _runs(folder):
        return
    names = [
        "survey.json",
        "heads.parquet",
        "index.html",
        *(name for entry in entries for name in files_of(entry.file)),
    ]
    existing = [folder / name for name in names if os.path.lexists(folder / name)]
    if existing and not _is_survey(folder / names[0]):  # a survey whose `records` were deleted may be replaced
        raise FileExistsError(f"{existing[0]} exists and was not written by a survey: choose another folder for out")


def _is_survey(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return '"kind": "survey"' in file.read(100)


def _runs(folder: Path) -> list[str]:
    """Marks of the runs that have written into the folder, the latest last."""
    manifest = folder / "records" / HERE
    if not os.path.lexists(manifest):
        return []
    marks = manifest.read_text(encoding="utf-8", errors="replace").split() if manifest.is_file() else [""]
    if not all(map(MARK.fullmatch, marks)):
        raise ValueError(f"{manifest} was not written by a survey: choose another folder for out")
    return marks


def _folders(folder: Path) -> list[Path]:
    """The folders that a survey writes to."""
    return [folder, *(folder / name for name in FOLDERS)]


def _prepare(folder: Path) -> str:
    """Create the folders, register this run in the manifest, and remove partial files of runs that were killed.

    A run adds its mark to the manifest before it writes anything else, so that file names ending in a listed mark are
    known to belong to a survey.
    """
    before = _runs(folder)
    for part in _folders(folder):
        try:
            part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"could not create {part}: {error.strerror or error}") from None
    remove_temporaries(before, _folders(folder))
    token = secrets.token_hex(16)
    append_line(folder / "records" / HERE, token)
    return token


def _write(folder: Path, token: str, jobs: Sequence[Job], broken: Mapping[Entry, str]) -> Survey:
    """Write the table of heads, one model at a time, and the survey."""
    if len(broken) == len(jobs):
        first, why = next(iter(broken.items()))
        raise ValueError(f"none of the {len(broken)} models could be read; {first.name}: {why}")
    rows: list[dict[str, Any]] = []

    def parts() -> Iterator[tuple[dict[str, Any], dict[str, list[Any]]]]:
        for job in jobs:
            if (entry := job.entry) not in broken:
                record = json.loads(job.record.read_text(encoding="utf-8"))
                row = {**record["model"], "run": entry.run, "step": entry.step, "file": entry.file}
                rows.append({**row, "source": entry.source})
                yield {**row, "model": entry.name}, record["heads"]

    write_rows(folder / "heads.parquet", parts(), token)
    missing = [
        {"name": entry.name, "source": entry.source, "why": why}
        for entry, why in sorted(broken.items(), key=lambda item: item[0].name)
    ]
    survey = Survey(models=rows, broken=missing, provenance=provenance(), **answer(rows))
    write_all({folder / "survey.json": survey.to_json() + "\n", folder / "index.html": survey.page()}, token)
    return survey
