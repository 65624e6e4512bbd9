"""Which fields of a config move scores, and which of their values are read exactly: one field changed at a time.

For each type, a tiny model is built from its default config with one field changed. Its scores, masks and feeding norms
are compared with those that are read from its files with the changed config, as it was given, with all defaults, and
with as few values as it needs; and with the default config, which tells whether the field moves anything.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from keyquery.checkpoints.coverage import general, unread_tensors
from keyquery.checkpoints.locations import module_name
from keyquery.checkpoints.reader import open_path, read_recognised
from keyquery.proof.models import CannotBuildError, brief, sparse
from keyquery.proof.proof import agrees, judged, run, save, tiny_run
from keyquery.support.extras import optional
from keyquery.support.files import append_line, regular
from tools.architectures.fields import alternatives, reads, rotations, varied
from tools.architectures.workers import Job, answered, serve

RELEASED = Path(__file__).with_name("released.toml")  # configs of released models: what differs from the defaults
PAIRS = 20  # of two changes of a type
GOOD = ("listed", "exact", "inert", "no softmax attention")


def sweep(
    types: Collection[str], cache_file: Path, again: Collection[str] = (), defaults: bool = False
) -> Iterator[dict[str, Any]]:
    """Rows of all variants of types, or of their default configs: those in the cache, and the others as they are tried.

    `again`: statuses that are tried once more. Default configs come first, so that a sweep may be stopped.
    """
    if cache_file.exists():
        regular(cache_file)
    cached_rows = {_key(row): row for row in _cached(cache_file) if row["status"] not in again}
    listed = list(_rows([{"type": name, "list": True} for name in types], cached_rows, cache_file))
    yield from listed
    read = set()
    for row in _rows([{"type": name, "change": {}} for name in types], cached_rows, cache_file):
        read |= {row["type"]} if row["status"] == "exact" else set()
        yield row
    if defaults:
        return
    changes = ({"type": row["type"], "change": change} for row in listed for change in row.get("changes", []) if change)
    alone = list(_rows([job for job in changes if job["type"] in read], cached_rows, cache_file))
    yield from alone
    yield from _rows(list(_pairs(alone)), cached_rows, cache_file)


def _pairs(rows: list[dict[str, Any]]) -> Iterator[Job]:
    """Two changes that are read alone, made together: of switches and words, and not of numbers."""
    moving: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        values = list(row["change"].values())
        if row["status"] == "exact" and len(values) == 1 and (values[0] is None or isinstance(values[0], (bool, str))):
            moving.setdefault(row["type"], []).append(row["change"])
    for name, singles in moving.items():
        both = (one | other for one, other in combinations(singles, 2) if one.keys() != other.keys())
        yield from ({"type": name, "change": change} for change in islice(both, PAIRS))


def _rows(jobs: list[Job], cached_rows: Mapping[str, dict[str, Any]], cache_file: Path) -> Iterator[dict[str, Any]]:
    yield from (cached_rows[_key(job)] for job in jobs if _key(job) in cached_rows)
    rest = [job for job in jobs if _key(job) not in cached_rows]
    for job, answer in answered("tools.architectures.sensitivity", rest):
        row = {**job, **(answer if isinstance(answer, dict) else {"status": "cannot be built", "reason": answer})}
        append_line(cache_file, "\n" + json.dumps(row))
        yield row


def _key(job: Mapping[str, Any]) -> str:
    return json.dumps([job["type"], job.get("list", False), job.get("change")], sort_keys=True)


def _cached(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    whole = (json.loads(line) for line in lines if line.startswith("{") and line.endswith("}"))  # one may be a part
    return [row for row in whole if row.get("transformers", version("transformers")) == version("transformers")]


def answer(job: Job) -> dict[str, Any]:
    """The row of a job: the variants of a type, or the status of one of them."""
    start = time.process_time()
    try:
        row = _variants(job["type"]) if job.get("list") else _status(job["type"], job["change"])
    except CannotBuildError as error:
        row = {"status": "cannot be built", "reason": str(error)}
    except Exception as error:
        row = {"status": "cannot be built", "reason": brief(error)}
    return {**row, "seconds": round(time.process_time() - start, 2), "transformers": version("transformers")}


@cache
def _base(model_type: str) -> tuple[Any, dict[str, Any], dict[str, list[str]]]:
    """The tiny default config of a type, the values that it needs, and who reads which of its fields."""
    with reads() as seen:
        model, _ = tiny_run(model_type)
    readers = {name: sorted(classes) for (kind, name), classes in seen.items() if kind == model.config.model_type}
    return model.config, sparse(model.config), readers


def _variants(model_type: str) -> dict[str, Any]:
    """All changes of a type's config that are tried, and the fields that its models read."""
    config, base, readers = _base(model_type)
    heads = int(getattr(config, "num_attention_heads", None) or 4)
    width = int(getattr(config, "head_dim", None) or int(getattr(config, "hidden_size", None) or 32) // heads)
    names = varied({(model_type, name): set(classes) for name, classes in readers.items()}, model_type)
    changes: list[dict[str, Any]] = [{}]
    changes += [{name: value} for name in names for value in alternatives(config, name, heads, width)]
    changes += rotations(config, width // 2) if "rope_parameters" in readers else []
    changes += released().get(model_type, [])
    unique = {json.dumps(change, sort_keys=True, default=str): change for change in changes}
    cls = type(config)
    facts = {
        "base": base,
        "defaults": cls().to_dict(),
        "names": [*getattr(cls, "attribute_map", {}), *cls.__dataclass_fields__],
    }
    return {"status": "listed", "fields": sorted(readers), "varied": names, "changes": list(unique.values()), **facts}


def _status(model_type: str, change: Mapping[str, Any]) -> dict[str, Any]:
    """Whether a variant is read exactly, and whether the default config would read it as well ("inert")."""
    if change:
        _, base, _ = _base(model_type)
        facts = {**_without_aliases(base, change, model_type), **change}
        values = copy.deepcopy({name: value for name, value in facts.items() if name != "model_type"})
        model, runs = run(optional("transformers", "fields").CONFIG_MAPPING[model_type](**values))
    else:
        facts, (model, runs) = None, tiny_run(model_type)
    proof = judged(model, runs, {"model_type": model_type}, facts)
    about: dict[str, Any] = {
        "family": proof.family,
        "modules": len(proof.modules or proof.missing),
        "content": bool(proof.content),
    }
    about["error"] = proof.error
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder)
        moves = not change or not agrees(model, runs, Path(folder), base)
        if proof.status == "exact":
            return {"status": "exact" if moves else "inert", "tensors": _unread(Path(folder)), **about}
    ignored = proof.status == "wrong" and not moves  # by the model, and not by the reader
    return {"status": "ignored" if ignored else proof.status, "reason": proof.reason, "norms": proof.norms, **about}


def _without_aliases(base: Mapping[str, Any], change: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """A config without other names of the fields that are changed."""
    names = getattr(optional("transformers", "fields").CONFIG_MAPPING[model_type], "attribute_map", {})
    changed = {names.get(name, name) for name in change}
    return {name: value for name, value in base.items() if names.get(name, name) not in changed}


def _unread(folder: Path) -> list[str]:
    """Patterns of the tensors of attention modules that no role reads; the scores being exact, they are of none."""
    heads = read_recognised(open_path(folder), trusted=True)
    located = [location for location, _ in heads._locations]
    modules = sorted((f"{module_name(location)}." for location in located), key=len, reverse=True)
    unread = unread_tensors(heads.source.shapes, located)
    return sorted({general(name.removeprefix(next(m for m in modules if name.startswith(m)))) for name in unread})


@cache
def released() -> dict[str, list[dict[str, Any]]]:
    """What configs of released models say, by type, in sizes of tiny models."""
    listed = tomllib.loads(RELEASED.read_text(encoding="utf-8"))
    return {
        kind: [{k: None if v == "none" else v for k, v in c.items()} for c in rows] for kind, rows in listed.items()
    }


if __name__ == "__main__":
    serve(answer)
