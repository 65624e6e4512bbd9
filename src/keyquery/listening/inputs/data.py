"""What an analysis runs a model on: a text in windows, or batches of inputs; checked before a model is built.

Any model will do, whatever it calls its token ids, with or without a mask of padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.checkpoints.sources import bare
from keyquery.listening.exclusive import temporarily
from keyquery.listening.hooks import Batch, batches_of, has_two_sides, on_input, running
from keyquery.listening.inputs.batches import LENGTH, TOKENS, read_lines, text_batches, with_decoder_ids
from keyquery.listening.inputs.load import has_lm_head, load_model
from keyquery.support.checks import check_count
from keyquery.support.progress import Progress

IDS, MASK = "input_ids", "attention_mask"
UNNAMED = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Arguments of an analysis that concern data; checked when created."""

    text: str | Path | None = None
    inputs: Batch | Iterable[Batch] | None = None
    tokenizer: Any = None
    length: int = LENGTH
    tokens: int = TOKENS
    device: Any = None
    dtype: str | torch.dtype | None = None

    def __post_init__(self) -> None:
        check_count("length", self.length, least=2)
        check_count("tokens", self.tokens, least=2)
        if self.text is not None and self.inputs is not None:
            raise ValueError("pass either text or inputs, not both")
        if self.text is not None and not isinstance(self.text, (str, Path)):
            raise TypeError(f"text must be the path of a text file, got a {type(self.text).__name__}")

    def load(
        self, source: Any, watching: Progress, adapter: str | Path | None = None, lm_head: bool = False
    ) -> Prepared:
        """The model, with its LoRA adapter, and its batches, none of which has run; `lm_head`: with one if stored."""
        lines = None if self.text is None else read_lines(self.text)
        batches = None
        if self.inputs is not None:
            batches = [self.inputs] if isinstance(self.inputs, Mapping) else list(batches_of(self.inputs, "inputs"))
            if not batches:
                raise ValueError("inputs must hold at least one batch, got none")
        live = isinstance(source, nn.Module)
        if live and (self.device, self.dtype) != (None, None):
            raise ValueError("a live model runs where it is: move it with model.to(device, dtype), and omit both here")
        [(model, stored_tokenizer)] = [
            (bare(path), None)
            if live
            else load_model(path, lm_head and has_lm_head(path), adapter, self.device, self.dtype)
            for path in watching([source], "building the model", 1)
        ]
        tokenizer = self.tokenizer or stored_tokenizer
        if lines is None:
            return Prepared(model, tokenizer, batches or [], "inputs")
        argument = getattr(model, "main_input_name", "input_ids")
        if argument != "input_ids":
            raise ValueError(f"{type(model).__name__} takes {argument}, not text: pass `inputs` from Python")
        if tokenizer is None:
            raise ValueError("text needs a tokenizer: none was passed, and none was found with the model")
        windows: list[Batch] = list(text_batches(lines, tokenizer, self.length, self.tokens))
        windows = with_decoder_ids(windows) if has_two_sides(model) else windows
        return Prepared(model, tokenizer, windows, Path(str(self.text)).name)


@dataclass(frozen=True)
class Prepared:
    """A live model, and the batches to run it on; none without data."""

    model: nn.Module
    tokenizer: Any
    batches: list[Batch]
    origin: str  # name of the text, or "inputs"


def token_argument(model: nn.Module) -> str:
    """The argument that a model takes token ids in: `input_ids`, or else the first of its forward."""
    named = _named(model)
    return IDS if not named or IDS in named else named[0]


def takes(model: nn.Module, name: str) -> bool:
    """Whether a model takes an argument, by its name or among any others."""
    kinds = [parameter.kind for parameter in signature(model.forward).parameters.values()]
    return name in _named(model) or Parameter.VAR_KEYWORD in kinds


def as_arguments(model: nn.Module, batch: Batch) -> Iterator[Batch]:
    """A batch of token ids as arguments of a model; in parts without padding, if the model takes no mask."""
    if not isinstance(batch.get(IDS), Tensor) or takes(model, IDS):
        yield batch
        return
    name, ids, mask = token_argument(model), batch[IDS], batch.get(MASK)
    rest = {key: value for key, value in batch.items() if key not in (IDS, MASK)}
    if mask is None or takes(model, MASK):
        yield {name: ids, **({} if mask is None else {MASK: mask}), **rest}
        return
    lengths = mask.sum(1)
    for length in lengths.unique(sorted=True).flip(0).tolist():
        rows = (lengths == length).nonzero().squeeze(1)
        real = mask[rows].bool()
        same = {key: value[rows] if len(value) == len(ids) else value for key, value in rest.items()}
        yield {name: ids[rows][real].reshape(len(rows), length), **same}


def embedded_tokens(model: nn.Module) -> int | None:
    """How many tokens a model has: the size of the `nn.Embedding` that its ids enter; None if they enter none."""
    ids, sizes = torch.tensor([[1, 0, 0, 1]]), list[int]()  # unlike positions, which count up

    def note(module: nn.Embedding, args: tuple[Tensor, ...], kwargs: Any) -> None:
        if args and args[0].numel() == ids.numel() and torch.equal(args[0].reshape(ids.shape).cpu(), ids):
            sizes.append(module.num_embeddings)

    def attach(stack: ExitStack) -> None:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                on_input(module, note, stack)

    with temporarily(model, attach), running(model) as run:
        try:
            run({token_argument(model): ids})
        except Exception:  # it takes something else, and may raise anything
            return None
    return max(sizes, default=None)


def _named(model: nn.Module) -> list[str]:
    parameters = signature(model.forward).parameters
    return [name for name, parameter in parameters.items() if parameter.kind not in UNNAMED]
