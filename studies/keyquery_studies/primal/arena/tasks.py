"""The four tasks: published sizes and results, and their sequences, prepared once and cached in the study's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from keyquery.learn.data import load_images, read_column
from keyquery.support.arrays import read_arrays
from keyquery.support.files import write_all
from keyquery.support.progress import Progress, silent
from keyquery_studies.common.store import digest_of, npz_bytes, read_json
from keyquery_studies.primal.arena.listops import listops
from keyquery_studies.primal.arena.pathfinder import pathfinder

SPLITS = ("train", "validation", "test")
CHUNK = 1000  # examples generated from one seed, in whichever process
VERSION = 1  # of the generators: sequences of different versions are never mixed
Rows = tuple[UInt8[np.ndarray, "count n"], UInt8[np.ndarray, " count"]]
GENERATORS: dict[str, Callable[[int, Any], Rows]] = {"listops": listops, "pathfinder": pathfinder}


@dataclass(frozen=True, kw_only=True)
class ArenaTask:
    """Sizes and published results of a task; `settings` holds rank and eta of both primal models."""

    length: int
    vocabulary: int
    classes: int
    padded: bool
    batch: int
    steps: int
    warmup: int
    settings: Mapping[str, tuple[int, float]]
    accuracy: Mapping[str, float]  # published, single run, in percent
    faster: float  # published speed-up of primal over a softmax that materialises all scores
    examples: tuple[int, int, int]  # training, validation and test
    checks: int = 20  # evaluations during training; published: 100 for ListOps, 40 for Text, 200 for the others
    source: str | None = None  # the file it is built from; None: generated


def _published(*accuracy: float) -> dict[str, float]:
    return dict(zip(("primal", "primal+", "general"), accuracy, strict=True))


TASKS: dict[str, ArenaTask] = {
    "listops": ArenaTask(
        length=2000,
        vocabulary=16,
        classes=10,
        padded=True,
        batch=32,
        steps=5000,
        warmup=1000,
        settings={"primal": (20, 0.1), "primal+": (30, 0.05)},
        accuracy=_published(37.3, 37.3, 37.1),
        faster=3.4,
        examples=(96_000, 2_000, 2_000),
    ),
    "text": ArenaTask(
        length=4096,
        vocabulary=256,
        classes=2,
        padded=True,
        batch=32,
        steps=20_000,
        warmup=8000,
        settings={"primal": (20, 0.05), "primal+": (30, 0.1)},
        accuracy=_published(61.2, 65.4, 65.0),
        faster=7.4,
        examples=(22_500, 2_500, 25_000),
        source="a .tsv file with columns split, label and text",
    ),
    "image": ArenaTask(
        length=1024,
        vocabulary=256,
        classes=10,
        padded=False,
        batch=256,
        steps=35_000,
        warmup=175,
        settings={"primal": (30, 0.1), "primal+": (30, 0.1)},
        accuracy=_published(43.0, 43.9, 38.2),
        faster=2.3,
        examples=(45_000, 5_000, 10_000),
        checks=40,
        source="an .npz file of images with labels and n_train",
    ),
    "pathfinder": ArenaTask(
        length=1024,
        vocabulary=256,
        classes=2,
        padded=False,
        batch=256,
        steps=62_400,
        warmup=312,
        settings={"primal": (30, 0.1), "primal+": (20, 0.05)},
        accuracy=_published(68.3, 74.3, 74.2),
        faster=2.3,
        examples=(160_000, 20_000, 20_000),
        checks=40,
    ),
}


def prepare_arena(
    task: str,
    folder: Path,
    source: str | Path | None = None,
    examples: tuple[int, int, int] | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The facts of a task whose sequences are in `folder`; they are prepared if missing.

    ListOps and Pathfinder are generated in chunks, each from its own seed, so that the result does not depend on the
    number of `workers`. Text is built from a .tsv file with rows marked `train` and `test`, each text truncated to
    4,096 bytes; Image from an .npz file, converted to greyscale. Both get a validation split taken from the training
    examples. Default source: the sequences already in the folder.
    """
    known = TASKS[task]
    path = folder / "arena" / f"{task}.json"
    facts: dict[str, Any] = read_json(path, {})
    wanted = list(examples or known.examples)
    named = None if source is None or task in GENERATORS else Path(source).name
    reusable = facts.get("version") == VERSION and named in (None, facts["source"])
    if reusable and (task not in GENERATORS or facts["examples"] == wanted):
        return facts
    if task in GENERATORS:
        arrays = _generated(task, wanted, workers, progress or silent)
    elif source is None:
        raise ValueError(f"task {task!r} needs {known.source}: {folder} holds no sequences of an earlier run")
    else:
        arrays = (_texts if task == "text" else _images)(Path(source), wanted[1])
    facts = {
        "task": task,
        "version": VERSION,
        "digest": digest_of(*arrays.values()),
        "source": named,
        "examples": [len(arrays[f"{split}_labels"]) for split in SPLITS],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_all({path.with_suffix(".npz"): npz_bytes(arrays, compressed=False), path: json.dumps(facts) + "\n"})
    return facts


def load_arena(task: str, folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Tokens (count, n) and labels (count,) of each prepared split."""
    with np.load(folder / "arena" / f"{task}.npz", allow_pickle=False) as file:
        return {split: (file[split], file[f"{split}_labels"]) for split in SPLITS}


def _generated(task: str, examples: list[int], workers: int, progress: Progress) -> dict[str, np.ndarray]:
    """Generate all splits, in chunks; splits never share a seed, and the last chunk of each may be shorter."""
    chunk_specs = [
        (split, chunk, min(CHUNK, count - chunk * CHUNK))
        for split, count in enumerate(examples)
        for chunk in range(-(-count // CHUNK))
    ]
    parallel = workers > 1 and len(chunk_specs) > len(SPLITS)  # a few chunks take less time than starting a process
    with ProcessPoolExecutor(workers, get_context("spawn")) if parallel else nullcontext() as pool:
        generate = partial(_chunk, task)
        generated = pool.map(generate, chunk_specs) if pool is not None else map(generate, chunk_specs)
        chunks = list(progress(generated, f"generating {task}", len(chunk_specs)))
    arrays: dict[str, np.ndarray] = {}
    for number, split in enumerate(SPLITS):
        own = [rows for (split_number, _, _), rows in zip(chunk_specs, chunks, strict=True) if split_number == number]
        for name, part in ((split, 0), (f"{split}_labels", 1)):
            arrays[name] = np.concatenate([rows[part] for rows in own])
    return arrays


def _chunk(task: str, spec: tuple[int, int, int]) -> Rows:
    split, chunk, count = spec
    return GENERATORS[task](count, [split, chunk])


def _texts(path: Path, checked: int) -> dict[str, np.ndarray]:
    """Texts as bytes, padded with 0, which UTF-8 text does not contain."""
    length = TASKS["text"].length
    splits, names, texts = (read_column(path, column) for column in ("split", "label", "text"))
    tokens = np.zeros((len(texts), length), np.uint8)
    for row, text in zip(tokens, texts, strict=True):
        data = np.frombuffer(text.encode()[:length], np.uint8)
        row[: len(data)] = data
    if not set(names) <= {"0", "1"}:
        raise ValueError(f"{path}: label must be 0 or 1, got {', '.join(sorted(set(names))[:4])}")
    return _split(path, tokens, np.array(names, np.uint8), np.array(splits) == "train", checked)


def _images(path: Path, checked: int) -> dict[str, np.ndarray]:
    """Images as greyscale (ITU-R 601 luma), row by row; the first n_train images are the training set."""
    images = load_images(path)
    header = read_arrays(path, "n_train")
    if "n_train" not in header or images.labels is None:
        raise ValueError(f"{path} must hold labels, and n_train, how many images are to be trained on")
    count = int(header["n_train"])
    _, height, width, channels = images.pixels.shape
    if height * width != TASKS["image"].length:
        raise ValueError(f"{path}: images must be 32 × 32, got {height} × {width}")
    weights = np.array([299, 587, 114], np.uint32) if channels == 3 else np.array([1000], np.uint32)
    grey = np.concatenate([(part @ weights + 500) // 1000 for part in np.array_split(images.pixels, 20)])
    tokens = grey.reshape(len(grey), -1).astype(np.uint8)
    return _split(path, tokens, images.labels.astype(np.uint8), np.arange(len(grey)) < count, checked)


def _split(
    path: Path, tokens: np.ndarray, labels: np.ndarray, learned: np.ndarray, checked: int
) -> dict[str, np.ndarray]:
    """The given test split; `checked` training examples, drawn once, become the validation split."""
    rest = np.random.default_rng(0).permutation(np.nonzero(learned)[0])  # files are sorted by class
    if not checked < len(rest) < len(labels):
        raise ValueError(f"{path} must hold more than {checked} examples to train on, and some to test on")
    chosen = {"train": rest[checked:], "validation": rest[:checked], "test": np.nonzero(~learned)[0]}
    parts = {split: {split: tokens[rows], f"{split}_labels": labels[rows]} for split, rows in chosen.items()}
    return {name: array for part in parts.values() for name, array in part.items()}
