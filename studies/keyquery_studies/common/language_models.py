"""Language models of any kernel, trained with one recipe."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.layers import Attention, LanguageModel, Shape
from keyquery.learn.data import encode_corpus, read_column, read_corpus, train_tokenizer, unwrap
from keyquery.learn.training import Recipe, train
from keyquery.support.checks import check_choice, check_count
from keyquery.support.files import write_all
from keyquery_studies.common.objectives import BATCH, CAUSAL, HELD_OUT, Task
from keyquery_studies.common.runner import device_name
from keyquery_studies.common.store import checkpoint_path, digest_of, npy_bytes, read_json, result_name

INITS = ("default", "tied", "matched", "small")
SMALL = 0.02  # standard deviation of BERT's initialisation
PATIENCE = 10
EXAM = 1024  # test windows, used neither for training nor for model selection


def prepare(corpus: str | Path | None, folder: Path, vocabulary: int, force: bool = False) -> dict[str, Any]:
    """The facts of a corpus whose token ids are in `folder`; they are computed if missing.

    `corpus` is a text file, or a .tsv file with a column `text`, whose rows are shuffled; compressed or not. Default:
    the tokens in `folder`.
    """
    check_count("vocabulary", vocabulary, least=260, most=65536)
    facts: dict[str, Any] = read_json(folder / "tokens.json", {})
    if corpus is None:
        if not facts:
            raise ValueError(f"corpus must be a text file: {folder} has no tokens of an earlier run")
        if facts["vocabulary"] != vocabulary:
            raise ValueError(
                f"vocabulary must be {facts['vocabulary']}, as of the tokens in {folder}, got {vocabulary}"
            )
        return facts
    documents = read_documents(Path(corpus))
    text = "\n".join(documents)
    digest = digest_of(text)
    if (facts.get("digest"), facts.get("vocabulary")) == (digest, vocabulary):
        return facts
    if facts and not force:
        raise FileExistsError(
            f"{folder} holds tokens of {facts['corpus']}, made with other settings; --force replaces them"
        )
    tokenizer = train_tokenizer(text, vocabulary)
    ids = torch.cat([encode_corpus(document + "\n", tokenizer) for document in documents])
    facts = {"corpus": Path(corpus).name, "digest": digest, "vocabulary": vocabulary, "tokens": len(ids)}
    folder.mkdir(parents=True, exist_ok=True)
    contents: dict[str | Path, str | bytes] = {
        folder / "tokens.npy": npy_bytes(ids.numpy().astype(np.uint16)),
        folder / "tokenizer.json": json.dumps(tokenizer.facts, ensure_ascii=False),
        folder / "tokens.json": json.dumps(facts) + "\n",
    }
    write_all(contents)
    return facts


def text_in(path: Path) -> Path:
    """A text file, or the one of a folder: of several, the one that is named for books."""
    if not path.is_dir():
        return path
    files = sorted(file for file in path.iterdir() if ".txt" in file.suffixes)
    named = [file for file in files if "books" in file.name.lower()]
    if len(candidates := named or files) != 1:
        there = ", ".join(file.name for file in candidates) or "none"
        raise ValueError(f"data must hold one text file, such as books.txt.xz, and {path} holds {there}: name the file")
    return candidates[0]


def read_documents(path: Path) -> list[str]:
    """Documents in training order; rows of a table are shuffled, since they are often sorted by class."""
    if ".tsv" not in path.suffixes:
        return [unwrap(read_corpus(path))]
    rows = read_column(path)
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]


def tasks(
    folder: Path, device: str, objective: str, length: int, share: float = 1.0, batch: int = BATCH
) -> tuple[Task, Task]:
    """The training task with its validation split, and the test task.

    A model is trained on the first `share` of the text; half of the held-out end is for validation, half for testing.
    """
    ids, tokenizer = _load(folder, device)
    kept = int(len(ids) * (1 - HELD_OUT))
    learned, half = ids[: int(kept * share)], (len(ids) - kept) // 2
    task = Task(objective, learned, ids[kept : kept + half], length, tokenizer, batch=batch)
    return task, Task(objective, learned, ids[kept + half :], length, tokenizer, checks=EXAM)


@lru_cache(maxsize=1)
def _load(folder: Path, device: str) -> tuple[Int[Tensor, " tokens"], Tokenizer]:
    """All token ids, on the device, and the tokenizer."""
    ids = np.load(folder / "tokens.npy").astype(np.int32)
    return torch.from_numpy(ids).to(device), Tokenizer.load(folder)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the language models of a study, and of their trainings: the plans of `kernels` and `mask` extend it."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3)  # the first grid of learning rates
    steps: int = 2500
    vocabulary: int = 2048
    width: int = 96
    depth: int = 3
    length: int = 128
    batch: int = 64

    def __post_init__(self) -> None:
        for name in ("steps", "width", "depth", "length", "batch"):
            check_count(name, getattr(self, name), least=1)
        if not self.seeds or not self.rates or min(self.rates) <= 0:
            raise ValueError(f"seeds and rates must not be empty, and rates above 0, got {self.seeds} and {self.rates}")

    def sizes(self) -> dict[str, Any]:
        """What a `Training` takes of it."""
        return {name: getattr(self, name) for name in ("steps", "vocabulary", "width", "depth", "length", "batch")}


@dataclass(frozen=True, kw_only=True)
class Training:
    """One language model."""

    objective: str
    kernel: str
    seed: int
    steps: int
    text: str  # the digest of the corpus
    vocabulary: int
    share: float = 1.0  # of the text that is trained on
    rope: bool = False
    init: str = "default"
    lr: float = 2e-3
    width: int = 256
    depth: int = 4
    heads: int = 4
    length: int = 128
    batch: int = BATCH
    windows: tuple[int, ...] = ()  # lengths at which the heads of the trained model are measured

    def __post_init__(self) -> None:
        check_choice("objective", self.objective, tuple(CAUSAL))
        check_choice("init", self.init, INITS)
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")
        if self.init != "default" and self.kernel != "general":
            raise ValueError(f"init {self.init!r} needs separate queries and keys, not kernel {self.kernel!r}")

    @property
    def name(self) -> str:
        """The name of its result file."""
        marks = ["rope"] if self.rope else []
        words = (self.objective, self.kernel, *marks, self.init, self.share, self.steps, self.lr, self.seed)
        return result_name(words, {**asdict(self), "exam": EXAM, "recipe": asdict(self.recipe())})

    def shape(self) -> Shape:
        """The shape of the model."""
        return Shape(
            vocab_size=self.vocabulary,
            width=self.width,
            depth=self.depth,
            num_attention_heads=self.heads,
            length=self.length,
            causal=CAUSAL[self.objective],
            kernel=self.kernel,
            rope=self.rope,
        )

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """Train with validation, and evaluate on the test split."""
        task, exam = tasks(folder, device, self.objective, self.length, self.share, self.batch)
        torch.manual_seed(self.seed)
        model = LanguageModel(self.shape())
        begin(model, self.init)
        model = model.to(device)
        start, path = perf_counter(), checkpoint_path(folder, self.name)
        facts = {
            **asdict(self),
            "batch": self.batch,
            "tokens": len(task.ids),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "device": device_name(device),
        }
        try:
            log = train(model, task.draw, task.loss, self.recipe(), validate=task.validate, checkpoint=path)
        except FloatingPointError:  # a rate that is too high is a result, too
            path.unlink(missing_ok=True)
            return {**facts, "loss": None, "validation": None, "best_step": 0, "curve": [], "seconds": None}
        return {
            **facts,
            "loss": exam.validate(model),
            "validation": log.best,
            "best_step": log.best_step,
            "curve": [[int(row["step"]), row["validation"]] for row in log.rows],
            "seconds": perf_counter() - start,
            **({"heads": self.measured(task, model)} if self.windows else {}),
        }

    def measured(self, task: Task, model: nn.Module) -> list[dict[str, Any]]:
        """Symmetry and shares of every head of the trained model, by the length of the window."""
        return [{"window": length, **row} for length in self.windows for row in task.look(model, length)]

    def recipe(self) -> Recipe:
        """The recipe of the study `objectives`, with 32 evaluations; 10 without improvement end the training."""
        warmup, every = min(300, self.steps // 4), max(self.steps // 32, 1)
        options: dict[str, Any] = {"weight_decay": 0.1, "check_every": every, "patience": PATIENCE}
        return Recipe(self.steps, lr=self.lr, warmup=warmup, seed=self.seed, **options)


def begin(model: nn.Module, init: str) -> None:
    """Initialise the queries and keys of every unconstrained head.

    - tied: Wq := Wk, as published
    - matched: tied, and both scaled so that each head's ‖M‖ stays what it was
    - small: normal with standard deviation 0.02 and no bias, as the published baseline starts
    """
    check_choice("init", init, INITS)
    for layer in model.modules():
        if isinstance(layer, Attention) and layer.query is not None and init != "default":
            with torch.no_grad():
                _begin(layer, layer.query, layer.key, init)


def _begin(layer: Attention, query: nn.Linear, key: nn.Linear, init: str) -> None:
    if init == "small":
        for part in (query, key):
            nn.init.normal_(part.weight, std=SMALL)
            nn.init.zeros_(part.bias)
        return
    before = layer.form().norm2
    query.load_state_dict(key.state_dict())
    if init == "matched":
        # ‖M‖² is of fourth order in the weights; the bias is scaled with the projection.
        gain = ((before / layer.form().norm2) ** 0.25).repeat_interleave(layer.head_dim).to(key.weight.dtype)
        for part in (query, key):
            part.weight.mul_(gain.unsqueeze(-1))
            part.bias.mul_(gain)


def first_below(curve: list[list[float]], loss: float) -> float | None:
    """The step at which a validation curve, straight between its points, first reaches `loss`; None if it never
    does.
    """
    last_step, last_loss = 0.0, math.inf
    for step, value in curve:
        if value <= loss:
            far = 1.0 if math.isinf(last_loss) else (last_loss - loss) / (last_loss - value)
            return float(last_step + far * (step - last_step))
        last_step, last_loss = step, value
    return None
