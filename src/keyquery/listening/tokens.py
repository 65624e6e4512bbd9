"""The tokens of a running model: which are padding, and the true position of each, for every attention call alike.

Positions are those that the model itself uses: ids given to a position embedding, to a rotary embedding or to the
model; else the number of real tokens before each (as BLOOM and OPT count them). Where the model sees offsets alone, the
first real token of a sequence is at 0, whatever padding stands before it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from keyquery.layers import Attention, Cache
from keyquery.listening.call import Tokens
from keyquery.listening.exclusive import in_use
from keyquery.listening.inputs.positions import cross_tokens, fitting, self_tokens, so_far

# Names of token masks: 1 (or True) for non-padding in REAL; True (or −∞) for padding in HIDDEN, as in torch.
REAL = ("attention_mask", "decoder_attention_mask", "padding_mask")
HIDDEN = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")
POSITION_EMBEDDING = re.compile(r"wpe|places|pos\w*|emb\w*_pos\w*")


def in_backward() -> bool:
    """Whether a backward pass runs: modules called in it, by activation checkpointing, compute a forward again."""
    return bool(torch._C._current_graph_task_id() != -1)


def nested(first: str, second: str) -> bool:
    """Whether one of two modules is the other, or holds it."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def masks_of(arguments: Mapping[str, Any]) -> dict[str, Bool[Tensor, "batch n"]]:
    """Masks of non-padding tokens, by argument name."""
    masks = {name: arguments[name] for name in (*REAL, *HIDDEN) if isinstance(arguments.get(name), Tensor)}
    return {name: mask.bool() if name in REAL else mask == 0 for name, mask in masks.items() if mask.ndim == 2}


def mask_for(
    masks: Mapping[str, Tensor], shape: tuple[int, ...], module: str, paired: bool
) -> Bool[Tensor, "batch n"] | None:
    """The mask of a module's tokens: the first of matching shape; None if there is none.

    In an encoder-decoder model (`paired`), each side has its own masks.
    """
    other = ("decoder_", "tgt_")
    inside = "decoder" in module.split(".")
    for name, mask in masks.items():
        if tuple(mask.shape) == tuple(shape) and (not paired or name.startswith(other) == inside):
            return mask
    return None


def config_of(model: nn.Module) -> Any:
    """The config of a model; of a multimodal one, that of its text model."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def context_of(model: nn.Module) -> int | None:
    """The longest sequence that a model takes, by its config or its learned positions; None if neither says so."""
    for name in ("max_position_embeddings", "n_positions", "length"):
        configured = getattr(config_of(model), name, None)
        if isinstance(configured, int) and configured > 0:
            return configured
    tables = (
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and POSITION_EMBEDDING.fullmatch(name.rpartition(".")[2])
    )
    return min(tables, default=None)


def has_two_sides(model: nn.Module) -> bool:
    """Whether a model is an encoder-decoder."""
    configured = getattr(getattr(model, "config", None), "is_encoder_decoder", None)
    return isinstance(model, nn.Transformer) if configured is None else bool(configured)


@dataclass(frozen=True, eq=False)
class Arguments:
    """What a module was called with, as far as attention in it depends on it."""

    position_ids: Tensor | None = None
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    cache: Any = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # arguments by name
    first: Tensor | None = None  # its first floating-point argument
    second: Tensor | None = None  # the next one of as many dimensions: the other sequence, in cross-attention


class Run:
    """The forward that is running in a model: frames of nested models, positions seen so far."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.paired = model, has_two_sides(model)
        self.frames: list[tuple[nn.Module, Arguments]] = []  # of the model, and of models in it, that run
        self.count = 0  # forwards so far
        self.thread: int | None = None
        self.embedded: Tensor | None = None  # ids given to a position embedding: positions are absolute
        self.rotary: Tensor | None = None  # ids given to a rotary embedding
        self.arguments: dict[nn.Module, Arguments] = {}
        self._tokens: dict[Any, tuple[Tokens, Any]] = {}  # with what they come from, whose ids stay valid so
        self._paused = False

    def attach(self, modules: Mapping[str, nn.Module], changes: ExitStack) -> None:
        """Hooks that follow models, position embeddings and what attention modules are called with."""
        for name, module in modules.items():
            if module is self.model or hasattr(type(module), "main_input_name"):
                signature = signature_of(type(module).forward)
                decodes = self.paired and "decoder" in name.split(".")
                self._hook(module, partial(self._begin, signature, decodes), changes)
                after = Bound(partial(self._end, module))
                changes.callback(module.register_forward_hook(after, always_call=True).remove)
            elif "RotaryEmbedding" in type(module).__name__:
                self._hook(module, self._rotate, changes)
            elif type(module).forward is nn.Embedding.forward and POSITION_EMBEDDING.fullmatch(name.rpartition(".")[2]):
                self._hook(module, self._embed, changes)

    def watch(self, module: nn.Module, changes: ExitStack) -> None:
        """Keep what an attention module is called with."""
        self._hook(module, self.note, changes)

    def _hook(self, module: nn.Module, note: Any, changes: ExitStack) -> None:
        hook = module.register_forward_pre_hook(Bound(note), with_kwargs=True, prepend=True)
        changes.callback(hook.remove)

    def _begin(self, signature: inspect.Signature, decodes: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._paused and module is self.model and self.thread == get_ident():
            raise RuntimeError("the model is run by a function that listens to it: run it outside of that function")
        if (self.frames and self.thread != get_ident()) or in_use(self.model):
            raise RuntimeError("the model is running in another thread: run one after the other")
        if not self.frames and module is not self.model and in_backward():
            return
        if not self.frames or module is self.model:
            self.count += 1
        if module is self.model:  # an interrupt may have left frames, and a model does not call itself
            noted = {module: self.arguments[module]} if module in self.arguments else {}  # just now, if it attends
            self.clear()
            self.arguments |= noted
        self.thread = get_ident()
        try:
            arguments = signature.bind_partial(module, *args, **kwargs).arguments
        except TypeError:  # the call itself raises a better error
            arguments = dict(kwargs)
        arguments = {**arguments, **arguments.get("kwargs", {})}
        masks = {} if decodes else masks_of(arguments)  # a decoder calls its masks as the encoder does
        self.frames.append((module, Arguments(arguments.get("position_ids"), masks)))

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Context of functions that listen to the model: it cannot be run by them."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _end(self, module: nn.Module, *_: Any) -> None:
        if self.thread == get_ident() and any(running is module for running, _ in self.frames):
            while self.frames.pop()[0] is not module:
                pass
            if not self.frames:
                self.clear()

    def clear(self) -> None:
        """Forget the forward."""
        self.frames.clear()
        self.arguments.clear()
        self._tokens.clear()
        self.embedded = self.rotary = None

    def _rotate(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        self.rotary = positions if isinstance(positions, Tensor) else None

    def _embed(self, module: Any, args: Any, kwargs: Any) -> None:
        """Ids given to a position embedding, without the rows that are reserved for padding."""
        ids = args[0] if args else kwargs.get("input")
        offset = 0 if module.padding_idx is None else module.padding_idx + 1
        if isinstance(ids, Tensor) and not ids.is_floating_point():
            self.embedded = ids.clamp(min=offset) - offset

    def note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep what an attention module is called with."""
        if self.thread != get_ident() if self.frames else in_backward():
            return
        if isinstance(module, Attention):
            kwargs = signature_of(type(module).forward).bind_partial(module, *args, **kwargs).arguments
            args = ()
        values = [*args, *kwargs.values()]
        cache = next((v for v in values if isinstance(v, Cache) or hasattr(v, "get_seq_length")), None)
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        masks = {id(value) for name, value in tensors.items() if "mask" in name}
        floats = (v for v in values if isinstance(v, Tensor) and v.is_floating_point() and id(v) not in masks)
        first = next(floats, None)
        self.arguments[module] = Arguments(
            tensors.get("positions", tensors.get("position_ids")),
            masks_of(kwargs),
            getattr(cache, "past", cache),  # a swapped layer wraps the model's cache at each call
            tensors,
            first,
            None if first is None else next((v for v in floats if v.ndim == first.ndim), None),
        )

    def tokens(
        self, module: nn.Module, name: str, query: Tensor, key: Tensor, cross: bool, real: Tensor | None = None
    ) -> Tokens:
        """Positions and padding of the tokens of one call; `real` if the module itself says which keys are padding.

        Layers of one forward share them, so that what is computed from positions can be reused.
        """
        batch, n, m = len(query), query.shape[-2], key.shape[-2]
        given = self.arguments.get(module, Arguments())
        if real is None:  # keys of cross-attention are the encoder's; a cache may keep fewer keys, or have free slots
            cached = not cross and given.cache is not None
            real = self._mask((batch, m), "" if cross else name, given, cached)
        queries = self._mask((batch, n), name, given) if cross else None
        total = m if cross else so_far(given.cache, n, m, real)
        absolute = fitting(self.embedded, batch, n)
        candidates = (given.position_ids, self.rotary, *(frame.position_ids for _, frame in reversed(self.frames)))
        relative = (ids for given_ids in candidates if (ids := fitting(given_ids, batch, n)) is not None)
        ids = next(relative, None) if absolute is None else absolute
        facts = (batch, n, m, total, cross, query.device, *map(id, (*candidates, self.embedded, real, queries)))
        if facts not in self._tokens:
            tokens = (
                cross_tokens(queries, real, n, m, query.device)
                if cross
                else self_tokens(ids, absolute is not None, real, n, m, total, query)
            )
            self._tokens[facts] = tokens, (candidates, self.embedded, real, queries)
        return self._tokens[facts][0]

    def _mask(self, shape: tuple[int, int], name: str, given: Arguments, cached: bool = False) -> Tensor | None:
        """The mask of tokens of a shape, or with `cached` of any length, if there is one."""
        known = (given.masks, *(frame.masks for _, frame in reversed(self.frames)))
        for exact in (True, False) if cached else (True,):
            for masks in known:
                for length in [shape[1]] if exact else [mask.shape[1] for mask in masks.values()]:
                    mask = mask_for(masks, (shape[0], length), name, self.paired and masks is not given.masks)
                    if mask is not None:
                        return mask
        return None


signature_of = lru_cache(maxsize=64)(inspect.signature)  # of a class's forward: slow


class Bound:
    """A function bound to one model that must not be copied: a copy would act on the original.

    Where torch's compiler is in use it is left out of graphs: the state that it reads changes from call to call.
    """

    def __init__(self, function: Any) -> None:
        self._function = torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
        self.__wrapped__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("a changed model cannot be copied: undo the change first")

    def __reduce__(self) -> Any:
        raise RuntimeError("a changed model cannot be pickled: undo the change first, or save its state_dict()")
