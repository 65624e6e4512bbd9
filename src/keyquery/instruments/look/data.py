"""The data that a look runs a model on: a text in windows, or batches of inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.capture import text_batches
from keyquery.capture.batches import LENGTH, SIZE, TOKENS, read_lines, with_decoder_ids
from keyquery.capture.hooks import Batch
from keyquery.capture.load import has_lm_head, load_model
from keyquery.checkpoints import Heads
from keyquery.instruments.look.on_data import PAIRS, OnData
from keyquery.instruments.look.sample import Sample, take
from keyquery.instruments.roles.run import SEQUENCES, Options, run
from keyquery.support.checks import check_choice, check_count, checked_integers
from keyquery.support.progress import Progress
from keyquery.surgery.rewriting.attach import check_unchanged


@dataclass(frozen=True, kw_only=True)
class Data:
    """The arguments of `look` that concern data; checked when created, before a model is built."""

    text: str | Path | None = None
    inputs: Batch | Iterable[Batch] | None = None
    tokenizer: Any = None
    length: int = LENGTH
    lengths: Sequence[int] | None = ()
    tokens: int = TOKENS
    pairs: str = PAIRS[0]
    sample: int = 0
    roles: bool = False
    device: Any = None
    dtype: str | torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.text is None and self.inputs is None and not self.roles:
            raise ValueError("dtype is that of the model that runs: pass text, inputs or roles as well")
        check_count("sample", self.sample, least=0)
        check_count("length", self.length, least=2)
        check_count("tokens", self.tokens, least=2)
        check_choice("pairs", self.pairs, PAIRS)
        object.__setattr__(self, "lengths", checked_integers("lengths", self.lengths or (), least=2))
        if self.lengths and self.text is None:
            raise ValueError("lengths are windows of a text: pass text as well")
        if self.text is not None and self.inputs is not None:
            raise ValueError("pass either text or inputs, not both")
        if self.text is not None and not isinstance(self.text, (str, Path)):
            raise TypeError(f"text must be the path of a text file, got a {type(self.text).__name__}")

    def prepare(self, source: Any, watching: Progress, adapter: str | Path | None = None) -> Prepared | None:
        """The model, with its LoRA adapter, and its batches, none of which has run; None if nothing needs a run."""
        if self.text is None and self.inputs is None and not self.roles:
            return None
        lines = None if self.text is None else read_lines(self.text)
        batches = None if self.inputs is None else checked_batches(self.inputs)
        live = isinstance(source, nn.Module)
        if live and (self.device, self.dtype) != (None, None):
            raise ValueError("a live model runs where it is: move it with model.to(device, dtype), and omit both here")
        [(model, own_tokenizer)] = [
            (path, None)
            if live
            else load_model(path, self.roles and has_lm_head(path), adapter, self.device, self.dtype)
            for path in watching([source], "building the model", 1)
        ]
        tokenizer = self.tokenizer or own_tokenizer
        if lines is None:
            windows_of_inputs = {} if batches is None else {self.length: batches}
            return Prepared(self, model, tokenizer, windows_of_inputs, "inputs")
        argument = getattr(model, "main_input_name", "input_ids")
        if argument != "input_ids":
            raise ValueError(f"{type(model).__name__} takes {argument}, not text: pass `inputs` from Python")
        if tokenizer is None:
            raise ValueError("text needs a tokenizer: none was passed, and none was found with the model")
        seq2seq = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        windows: dict[int, list[Batch]] = {}
        for length in (self.length, *(self.lengths or ())):
            cut: list[Batch] = list(text_batches(lines, tokenizer, length, self.tokens))
            windows[length] = with_decoder_ids(cut) if seq2seq else cut
        return Prepared(self, model, tokenizer, windows, Path(str(self.text)).name)


@dataclass(frozen=True)
class Prepared:
    """A live model, and the batches to run it on by the length of their windows."""

    options: Data
    model: nn.Module
    tokenizer: Any
    windows: Mapping[int, list[Batch]]
    origin: str  # name of the text, or "inputs"

    def run(self, heads: Heads, watching: Progress) -> RunResult:
        """Metrics on windows of `length`, with the sample, and on windows of each of `lengths`; and roles if wanted."""
        options, on_data, lengths = self.options, OnData(), dict[int, OnData]()
        if self.windows:
            sample = take(self.model, self.windows[options.length], heads, options.sample, self.tokenizer)
            on_data = self._at(options.length, heads, watching, sample)
            lengths = {length: self._at(length, heads, watching) for length in options.lengths or ()}
        if not options.roles:
            return RunResult(on_data, lengths)
        check_unchanged(self.model)
        rows, facts, notes = run(
            self.model, heads, self.tokenizer, self._few(), Options(length=options.length), watching
        )
        roles = {(row["layer"], row["head"]): {key: row[key] for key in ("role", "roles", "scores")} for row in rows}
        return RunResult(on_data, lengths, roles, {**facts, "notes": notes})

    def _at(self, length: int, heads: Heads, watching: Progress, sample: Sample | None = None) -> OnData:
        described = {"longest": length, "from": self.origin, "pairs": self.options.pairs}
        return OnData.of(self.model, self.windows[length], heads, described, sample, watching)

    def _few(self) -> dict[str, list[Batch]]:
        """The batches that roles are measured on: as many sequences as of random tokens."""
        batches = self.windows.get(self.options.length, [])[: -(-SEQUENCES // SIZE)]
        return {"inputs" if self.options.text is None else "text": batches} if batches else {}


@dataclass(frozen=True)
class RunResult:
    """What came of running a model: metrics on data, also in windows of other lengths, and roles by layer and head."""

    on_data: OnData = field(default_factory=OnData)
    lengths: Mapping[int, OnData] = field(default_factory=dict)
    roles: Mapping[tuple[int, int], dict[str, Any]] | None = None
    facts_of_roles: Mapping[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Provenance: the data, and how roles were measured."""
        return {"data": self.on_data.facts} | ({} if self.roles is None else {"roles": self.facts_of_roles})

    @property
    def sample(self) -> dict[str, Any] | None:
        """The sample as stored in a look; None without one."""
        return None if self.on_data.sample is None else self.on_data.sample.to_dict()


def checked_batches(inputs: Batch | Iterable[Batch] | None) -> list[Batch]:
    """Inputs of a model as a list of batches."""
    batches: Any = [inputs] if isinstance(inputs, Mapping) else inputs
    wrong = batches
    if isinstance(batches, Iterable) and not isinstance(batches, (Tensor, str)):
        batches = list(batches)
        wrong = next((batch for batch in batches if not isinstance(batch, Mapping)), None)
    if wrong is not None:
        raise TypeError(f"inputs must be batches: mappings of argument names to tensors, got a {type(wrong).__name__}")
    if not batches:
        raise ValueError("inputs must hold at least one batch, got none")
    checked: list[Batch] = batches
    return checked
