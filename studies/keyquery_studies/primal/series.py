"""Time series of the UEA archive for the study `primal`: one training of one attention on one dataset."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.learn.base import hold_out
from keyquery.learn.data import load_ts
from keyquery.learn.data.series import Series
from keyquery.learn.fitting import epochs_of
from keyquery.learn.inputs.sequences import padded, statistics
from keyquery.learn.series.base import Labelled
from keyquery.learn.series.classifier import TIE, judged
from keyquery.learn.series.network import SeriesNetwork
from keyquery.learn.training import Recipe, train
from keyquery.support.checks import check_choice
from keyquery.support.files import write_all
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.store import array_file, digest_of, npz_bytes, read_json
from keyquery_studies.common.study import Trial
from keyquery_studies.primal.model import published_regularizer, start_as_published

ATTENTIONS = ("primal", "primal+", "general")
PROTOCOLS = ("held out", "published")
BATCH, DROPOUT, HELD_OUT = 16, 0.1, 0.2
JUDGED = 64  # batch size of evaluation
# Rank and eta of primal and of primal+, as published, per dataset.
PUBLISHED = {
    "EthanolConcentration": ((30, 0.1), (40, 0.2)),
    "FaceDetection": ((20, 0.1), (40, 0.2)),
    "Handwriting": ((30, 0.2), (20, 0.5)),
    "Heartbeat": ((30, 0.5), (40, 0.5)),
    "JapaneseVowels": ((40, 0.5), (30, 0.2)),
    "PEMS-SF": ((40, 0.1), (40, 0.0)),
    "SelfRegulationSCP1": ((30, 0.5), (30, 0.2)),
    "SelfRegulationSCP2": ((20, 0.0), (20, 0.2)),
    "SpokenArabicDigits": ((20, 0.1), (30, 0.2)),
    "UWaveGestureLibrary": ((20, 0.0), (40, 0.1)),
}
OTHERS = ((20, 0.1), (20, 0.1))  # for unpublished datasets: the lowest published rank, and the most common eta


def published_settings(dataset: str, attention: str, width: int = 512, heads: int = 8) -> dict[str, Any]:
    """Published rank and eta of a dataset, the rank at most the head width; softmax attention has neither.

    f(X) has min(10·rank, n) rows. The published number is 5·rank for some datasets, among them JapaneseVowels, where it
    makes no difference, since 5·rank exceeds its length, and Handwriting (100 or 150 rows of 152).
    """
    check_choice("attention", attention, ATTENTIONS)
    if attention == "general":
        return {"rank": 0, "eta": 0.0}
    rank, eta = PUBLISHED.get(dataset, OTHERS)[attention == "primal+"]
    return {"rank": min(rank, width // heads), "eta": eta}


def prepare_series(source: str | Path | None, folder: Path, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Facts of the datasets in a folder of files NAME_TRAIN.ts and NAME_TEST.ts, whose arrays are cached in `folder`.

    Files may be compressed (.ts.xz, .ts.gz), and their names may begin with "uea_". Default `names`: all; default
    `source`: the cache of earlier runs in `folder`.
    """
    index = folder / "series.json"
    known = {facts["dataset"]: facts for facts in read_json(index, [])}
    if source is None and not known:
        raise ValueError("series need a folder of .ts files: pass it as data (--data), or the out of an earlier run")
    pairs = {} if source is None else _pairs(Path(source))
    chosen = tuple(names or pairs or known)
    for name in chosen:
        check_choice("dataset", name, tuple(pairs or known))
    if source is None:
        return [known[name] for name in chosen]
    facts, contents = [], dict[str | Path, str | bytes]()
    for name in chosen:
        described, packed = _pack(name, *map(load_ts, pairs[name]))
        facts.append(described)
        contents[folder / array_file(name, described["digest"])] = packed
    folder.mkdir(parents=True, exist_ok=True)
    known |= {fact["dataset"]: fact for fact in facts}
    write_all({**contents, index: json.dumps(list(known.values())) + "\n"})
    return facts


def _pairs(folder: Path) -> dict[str, tuple[Path, Path]]:
    if not folder.is_dir():
        raise NotADirectoryError(f"series must be a folder of .ts files, got {folder}")
    paths: dict[tuple[str, str], Path] = {}
    for path in sorted(folder.iterdir()):
        if match := re.fullmatch(r"(?:uea_)?(.+)_(TRAIN|TEST)\.ts(?:\.xz|\.gz)?", path.name, re.IGNORECASE):
            place = (match[1], match[2].upper())
            if place in paths:
                raise ValueError(f"{paths[place].name} and {path.name} are the same part of the same set: keep one")
            paths[place] = path
    names = sorted({name for name, part in paths if part == "TRAIN"} & {name for name, part in paths if part == "TEST"})
    if not names:
        raise ValueError(f"{folder} holds no pair of files NAME_TRAIN.ts and NAME_TEST.ts")
    return {name: (paths[name, "TRAIN"], paths[name, "TEST"]) for name in names}


def _pack(name: str, learned: Series, test: Series) -> tuple[dict[str, Any], bytes]:
    """Facts and arrays of a dataset; labels are encoded as integers."""
    if learned.labels is None or test.labels is None or not learned.classes:
        raise ValueError(f"{name} has no class labels")
    if unseen := sorted(set(test.labels.tolist()) - set(learned.labels.tolist())):
        raise ValueError(f"{name}: the test file has classes that do not occur in training: {', '.join(unseen)}")
    classes, dims = sorted(set(learned.labels.tolist())), learned.values[0].shape[1]
    if test.values[0].shape[1] != dims:
        raise ValueError(f"{name}: training has {dims} dims, and test {test.values[0].shape[1]}")
    arrays: dict[str, np.ndarray] = {}
    for part, series in (("train", learned), ("test", test)):
        assert series.labels is not None
        arrays[f"{part}_values"] = np.concatenate(series.values)
        arrays[f"{part}_lengths"] = np.array([len(values) for values in series.values])
        arrays[f"{part}_labels"] = np.array([classes.index(label) for label in series.labels])
    sizes = {"train": len(learned), "test": len(test), "classes": len(classes), "dims": dims}
    length = int(max(arrays["train_lengths"].max(), arrays["test_lengths"].max()))
    return {"dataset": name, "digest": digest_of(*arrays.values()), **sizes, "length": length}, npz_bytes(arrays)


@lru_cache(maxsize=8)
def _load(path: Path, device: str) -> tuple[Labelled, Labelled]:
    """Training and test, standardised by the former, on the device."""
    with np.load(path) as arrays:
        parts = [
            (np.split(arrays[f"{part}_values"], arrays[f"{part}_lengths"].cumsum()[:-1]), arrays[f"{part}_labels"])
            for part in ("train", "test")
        ]
    mean, scale = statistics(parts[0][0])
    sets = []
    for series, labels in parts:
        target = torch.from_numpy(labels).to(device)
        sets.append(Labelled(padded(series, mean, scale, device), target, torch.ones_like(target, dtype=torch.float64)))
    return sets[0], sets[1]


@dataclass(frozen=True, kw_only=True)
class SeriesTrial(Trial):
    """One network on one dataset.

    Under "held out", the epoch is selected on a stratified validation split, a fifth of the training data; under
    "published", all of it is trained on, and the best epoch on the test data is taken, as in the published experiments:
    test-set selection, so that its accuracy is optimistic.
    """

    dataset: str
    digest: str  # of the data
    attention: str
    protocol: str = "held out"
    seed: int = 0
    width: int = 512
    heads: int = 8
    depth: int = 2
    rank: int = 20
    eta: float = 0.1
    epochs: int = 100

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, ATTENTIONS)
        if self.width % self.heads:
            raise ValueError(f"heads must divide width: {self.heads} does not divide {self.width}")

    def network(self, dims: int, classes: int, length: int) -> SeriesNetwork:
        """The network at initialisation, for training series of at most `length` tokens, each with its own weights."""
        sizes: dict[str, Any] = {"width": self.width, "depth": self.depth, "heads": self.heads, "bins": length}
        primal: dict[str, Any] = {"attention": self.attention, "rank": self.rank, "eta": self.eta}
        torch.manual_seed(self.seed)
        network = SeriesNetwork(dims, classes, dropout=DROPOUT, **primal, **sizes)
        start_as_published(network)
        return network

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train, and test the epoch selected by the protocol, and the last one."""
        everything, test = _load(folder / array_file(self.dataset, self.digest), device)
        learned, checked = everything, test
        if self.protocol == "held out":
            learned, checked = map(everything.take, hold_out(everything.target.cpu().numpy(), HELD_OUT, self.seed))
        classes, dims = int(everything.target.max()) + 1, everything.data.values.shape[-1]
        model = self.network(dims, classes, everything.data.real.shape[1]).to(device)
        draw, every = epochs_of(learned.take, len(learned.target), BATCH, self.seed)
        errors: list[float] = []
        last = [1.0]

        def validate(network: Any) -> float:
            error, loss = judged(network, checked, JUDGED)
            errors.append(error)
            if len(errors) == self.epochs:
                last[0] = error if checked is test else judged(network, test, JUDGED)[0]
            return error + TIE * loss

        options: dict[str, Any] = {"optimiser": "radam", "schedule": "flat", "warmup": 0, "weight_decay": 0.0}
        recipe = Recipe(self.epochs * every, lr=1e-3, clip=4.0, seed=self.seed, check_every=every, **options)
        log = train(model, draw, _loss, recipe, validate=validate)
        return {
            **self.settings(),
            "learned": len(learned.target),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "accuracy": 1 - judged(model, test, JUDGED)[0],
            "last_accuracy": 1 - last[0],
            "best_epoch": log.best_step // every,
            "curve": [1 - error for error in errors],  # validation accuracy
            "device": device_name(device),
        }


def _loss(model: nn.Module, batch: Labelled) -> Float[Tensor, ""]:
    return cross_entropy(model(*batch.data), batch.target) + published_regularizer(model)
