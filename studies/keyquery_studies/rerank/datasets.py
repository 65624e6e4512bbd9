"""Labelled embeddings for the study `rerank`: computed once, cached, and split by class."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from keyquery.learn.data import Revisited, load_images, load_revisited, read_column, read_corpus, unwrap
from keyquery.learn.inputs.vectors import vectors_of
from keyquery.learn.rerank.graph import nearest
from keyquery.support.extras import optional
from keyquery.support.files import regular, write_all
from keyquery.support.progress import Progress
from keyquery_studies.common.store import array_file, digest_of, npz_bytes
from keyquery_studies.rerank.embeddings import image_vectors, load_dino, text_vectors

WORDS = 60  # words per passage
STRETCH = 12  # consecutive passages that form a group
LEAST = 4  # classes: two for training, two for testing
DIGITS_SIZE, IMAGE_SIZE = 56, 112  # images are resized to
SHARE = 0.2  # share of the test items that are queries
NEAR = 5  # neighbours that vote


class Split(NamedTuple):
    """Training data and queries; `relevant` are database indices per query."""

    features: Float[np.ndarray, "m dim"]
    labels: Shaped[np.ndarray, " m"]
    queries: Float[np.ndarray, "q dim"]
    database: Float[np.ndarray, "n dim"]
    relevant: list[Int[np.ndarray, " _"]]
    truth: Revisited | None = None


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where vectors come from; a source that is None is left out."""

    images: Path | None = None  # what `kq.data.load_images` reads
    digits: bool = False  # the digits of scikit-learn
    weights: Path | None = None  # DINOv2 weights, for images and digits
    texts: Path | None = None  # a .tsv with label and text, or a text of several works separated by form feeds
    encoder: Path | None = None  # a folder with a sentence encoder, for texts
    revisited: Path | None = None  # a folder with gnd_NAME.pkl, NAME.npz or NAME.mat, and train.npz
    items: int = 3000  # maximum number of images and of passages

    def check(self) -> None:
        """Raise if a source lacks the model that embeds it."""
        if (self.images is not None or self.digits) and self.weights is None:
            raise ValueError("images need the weights of DINOv2: pass them as weights (--weights)")
        if self.texts is not None and self.encoder is None:
            raise ValueError("texts need a sentence encoder: pass its folder as encoder (--encoder)")
        if not any((self.images, self.digits, self.texts, self.revisited)):
            raise ValueError("pass at least one of images, digits, texts and revisited")


def prepare(sources: Sources, folder: Path, device: str, progress: Progress | None = None) -> dict[str, dict[str, Any]]:
    """Facts of every dataset, whose vectors are cached in `folder`; cached vectors are not recomputed."""
    sources.check()
    facts: dict[str, dict[str, Any]] = {}
    makers: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {}
    keys: dict[str, list[Any]] = {}
    if sources.images is not None:
        images, dino = sources.images, sources.weights
        keys["images"] = [_digest(images), _digest(dino), sources.items, IMAGE_SIZE]
        makers["images"] = lambda: _image_set(images, dino, sources.items, device, progress)
    if sources.digits:
        keys["digits"] = [_digest(sources.weights), DIGITS_SIZE]
        makers["digits"] = lambda: _digit_set(sources.weights, device, progress)
    if sources.texts is not None:
        texts, encoder = sources.texts, sources.encoder
        for name in ("texts",) if _is_table(texts) else ("texts", "stretches"):
            keys[name] = [_digest(texts), _digest(encoder), sources.items, WORDS, *[STRETCH] * (name == "stretches")]
            makers[name] = partial(_text_set, name, texts, encoder, sources.items, device, progress)
    for name, make in makers.items():
        digest = digest_of(repr(keys[name]))
        path = folder / _file(name, digest)
        if not path.exists():
            _keep(path, *make())
        facts[name] = {"digest": digest, **_facts(path)}
    return facts | ({} if sources.revisited is None else _revisited(sources.revisited, folder))


def load_split(folder: Path, name: str, digest: str, seed: int) -> Split:
    """Half of the classes for training, the other half for testing, with a fifth of its items as queries, by seed.

    ROxford and RParis have their own split.
    """
    with np.load(folder / _file(name, digest), allow_pickle=False) as arrays:
        loaded = {key: arrays[key] for key in arrays.files}
    if "queries" in loaded:
        return _benchmark(loaded)
    return split(loaded["features"], loaded["labels"], seed)


def split(features: Float[np.ndarray, "n dim"], labels: Shaped[np.ndarray, " n"], seed: int) -> Split:
    """Classes and queries drawn by the seed."""
    classes = np.unique(labels)
    if len(classes) < LEAST:
        raise ValueError(f"labels must have {LEAST} classes or more, half of them for training, got {len(classes)}")
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(classes)[: len(classes) // 2]
    learned = np.isin(labels, chosen)
    rest = rng.permutation(np.flatnonzero(~learned))
    count = max(round(SHARE * len(rest)), 1)
    queries, database = rest[:count], np.sort(rest[count:])
    relevant = [np.flatnonzero(labels[database] == label) for label in labels[queries]]
    return Split(features[learned], labels[learned], features[queries], features[database], relevant)


def _keep(path: Path, features: np.ndarray, labels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_all({path: npz_bytes({"features": features.astype(np.float32), "labels": labels}, compressed=False)})


def _facts(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as arrays:
        shape, labels = arrays["features"].shape, arrays["labels"]
        vectors = vectors_of("features", arrays["features"])
    facts = {"items": shape[0], "dim": shape[1], "classes": len(np.unique(labels))}
    return {**facts, "votes_right": votes_right(vectors, labels)}


def votes_right(vectors: Float[Tensor, "n dim"], labels: Shaped[np.ndarray, " n"]) -> float:
    """Leave-one-out accuracy of a vote of the five nearest neighbours."""
    count = min(NEAR + 1, len(vectors))
    _, numbers = np.unique(labels, return_inverse=True)
    votes = torch.from_numpy(numbers)[nearest(vectors, count)]
    return float((votes[:, 1:].mode(1).values == votes[:, 0]).double().mean())


def _file(name: str, digest: str) -> str:
    return array_file(f"vectors-{name}", digest)


def _digest(path: Path | None) -> str:
    """Digest of a file's bytes, or of the names and sizes of a folder's files."""
    if path is None or not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    if path.is_dir():
        contents = sorted(
            (str(file.relative_to(path)), file.stat().st_size) for file in path.rglob("*") if file.is_file()
        )
        return digest_of(repr(contents), length=64)
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _balanced(labels: Shaped[np.ndarray, " n"], most: int) -> Int[np.ndarray, " some"]:
    """Indices of equally many items per class, at most `most` in total; deterministic."""
    rng, classes = np.random.default_rng(0), np.unique(labels)
    each = [rng.permutation(np.flatnonzero(labels == label))[: max(most // len(classes), 2)] for label in classes]
    return np.sort(np.concatenate(each))


def _image_set(
    path: Path, weights: Path | None, most: int, device: str, progress: Progress | None
) -> tuple[np.ndarray, np.ndarray]:
    images = load_images(path)
    if images.labels is None:
        raise ValueError(f"{path} must have labels")
    chosen = _balanced(images.labels, most)
    dino = load_dino(weights or "")
    return image_vectors(images.pixels[chosen], dino, IMAGE_SIZE, device, progress=progress), images.labels[chosen]


def _digit_set(weights: Path | None, device: str, progress: Progress | None) -> tuple[np.ndarray, np.ndarray]:
    digits = optional("sklearn.datasets", "the data set digits").load_digits()
    pixels = np.rint(digits.images * 255 / 16).astype(np.uint8)[..., None]
    return image_vectors(pixels, load_dino(weights or ""), DIGITS_SIZE, device, progress=progress), digits.target


def _text_set(
    name: str, path: Path, encoder: Path | None, most: int, device: str, progress: Progress | None
) -> tuple[np.ndarray, np.ndarray]:
    if name == "stretches":
        texts, labels = stretches(path, most)
    else:
        texts, labels = passages(path)
        chosen = _balanced(labels, most)
        texts, labels = [texts[place] for place in chosen], labels[chosen]
    return text_vectors(texts, encoder or "", device=device, progress=progress), labels


def _is_table(path: str | Path) -> bool:
    return re.search(r"\.tsv(\.xz|\.gz)?$", str(path)) is not None


def passages(path: str | Path) -> tuple[list[str], Shaped[np.ndarray, " n"]]:
    """Texts and labels: columns of a .tsv file; or passages of 60 words, labelled by their work."""
    if _is_table(path):
        return read_column(path, "text"), np.array(read_column(path, "label"))
    texts, labels = [], []
    for label, work in enumerate(read_corpus(path).split("\f")):
        words = unwrap(work).split()
        parts = [" ".join(words[at : at + WORDS]) for at in range(0, len(words) - WORDS + 1, WORDS)]
        texts += parts
        labels += [label] * len(parts)
    return texts, np.array(labels)


def stretches(path: str | Path, most: int) -> tuple[list[str], Int[np.ndarray, " n"]]:
    """Passages labelled by their stretch of 12 consecutive ones; equally many stretches per work.

    Unlike works, stretches are many small groups.
    """
    texts, works = passages(path)
    chosen, labels = list[str](), list[int]()
    names = np.unique(works)
    for work in names:
        own = np.flatnonzero(works == work)
        count = min(len(own) // STRETCH, max(most // STRETCH // len(names), 1))
        for start in np.linspace(0, len(own) // STRETCH - 1, count).astype(int) * STRETCH:
            labels += [len(chosen) // STRETCH] * STRETCH
            chosen += [texts[place] for place in own[start : start + STRETCH]]
    return chosen, np.array(labels)


def _revisited(source: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Each benchmark of a folder, with the training vectors, as one file of arrays."""
    truths = sorted(source.glob("gnd_*.pkl"))
    train = source / "train.npz"
    if not truths or not train.is_file():
        raise ValueError(
            f"{source} must hold gnd_NAME.pkl, NAME.npz or NAME.mat, and train.npz with features and labels"
        )
    with np.load(train, allow_pickle=False) as arrays:
        if not {"features", "labels"} <= set(arrays.files):
            raise ValueError(f"{train} must hold features and labels; it holds {', '.join(arrays.files)}")
        learned = {key: arrays[key] for key in ("features", "labels")}
    facts = {}
    for truth in truths:
        name = truth.stem.removeprefix("gnd_")
        features = next((path for end in (".npz", ".mat", "") if (path := source / f"{name}{end}").exists()), None)
        if features is None:
            raise ValueError(f"{source} has {truth.name}, but neither {name}.npz nor {name}.mat")
        benchmark = load_revisited(truth, features)
        arrays_ = {**learned, "queries": benchmark.queries, "database": benchmark.database, **_groups(benchmark)}
        digest = digest_of(*arrays_.values())
        folder.mkdir(parents=True, exist_ok=True)
        write_all({folder / _file(name, digest): npz_bytes(arrays_, compressed=False)})
        sizes = {
            "items": len(benchmark.database),
            "dim": benchmark.database.shape[1],
            "classes": None,
            "votes_right": None,
        }
        facts[name] = {"digest": digest, **sizes}
    return facts


def _groups(benchmark: Revisited) -> dict[str, np.ndarray]:
    """Database indices of all queries, concatenated, and where each query's end."""
    arrays = {}
    for group in ("easy", "hard", "junk"):
        places = getattr(benchmark, group)
        arrays[group] = np.concatenate(places)
        arrays[f"{group}_ends"] = np.cumsum([len(relevant) for relevant in places])
    return arrays


def _benchmark(arrays: Mapping[str, np.ndarray]) -> Split:
    groups = {group: tuple(np.split(arrays[group], arrays[f"{group}_ends"][:-1])) for group in ("easy", "hard", "junk")}
    truth = Revisited(arrays["queries"], arrays["database"], groups["easy"], groups["hard"], groups["junk"])
    relevant, _ = truth.setup("medium")
    return Split(arrays["features"], arrays["labels"], arrays["queries"], arrays["database"], relevant, truth)
