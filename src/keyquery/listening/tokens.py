"""The tokens of a running model: which are padding, and the true position of each, for every attention call alike.

Positions are those that the model itself uses: ids given to a position embedding, to a rotary embedding or to the
model; else the number of real tokens before each (as BLOOM and OPT count them). Where the model sees offsets alone, the
first real token of a sequence is at 0, whatever padding stands before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import pad

from keyquery.layers import Attention, Cache
from keyquery.listening.call import Tokens
from keyquery.listening.exclusive import in_use
from keyquery.listening.hooks import POSITION_EMBEDDING, has_two_sides, on_input, on_output

# Names of token masks: 1 (or True) for non-padding in REAL; True (or −∞) for padding in HIDDEN, as in torch.
REAL = ("attention_mask", "decoder_attention_mask", "padding_mask")
HIDDEN = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")
Mask = Bool[Tensor, "batch tokens"] | None

signature_of = lru_cache(maxsize=64)(inspect.signature)  # of a class's forward: slow


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
    masks: Mapping[str, Tensor], shape: tuple[int, ...], module: str, paired: bool, exact: bool = True
) -> Bool[Tensor, "batch n"] | None:
    """The first mask of a module's tokens, of any length if not `exact`; None if there is none.

    In an encoder-decoder model (`paired`), each side has its own masks.
    """
    inside = "decoder" in module.split(".")
    on_side = (mask for name, mask in masks.items() if not paired or name.startswith(("decoder_", "tgt_")) == inside)
    return next((mask for mask in on_side if mask.shape == shape or (not exact and len(mask) == shape[0])), None)


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

    def attach(self, modules: Mapping[str, nn.Module], changes: ExitStack) -> None:
        """Hooks that follow models, position embeddings and what attention modules are called with."""
        for name, module in modules.items():
            if module is self.model or hasattr(type(module), "main_input_name"):
                signature = signature_of(type(module).forward)
                decodes = self.paired and "decoder" in name.split(".")
                on_input(module, partial(self._begin, signature, decodes), changes, first=True)
                on_output(module, self._end, changes, always=True)
            elif "RotaryEmbedding" in type(module).__name__:
                on_input(module, self._rotate, changes, first=True)
            elif type(module).forward is nn.Embedding.forward and POSITION_EMBEDDING.fullmatch(name.rpartition(".")[2]):
                on_input(module, self._embed, changes, first=True)

    def _begin(self, signature: inspect.Signature, decodes: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
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
                mask = mask_for(masks, shape, name, self.paired and masks is not given.masks, exact)
                if mask is not None:
                    return mask
        return None


def cross_tokens(queries: Mask, keys: Mask, n: int, m: int, device: torch.device) -> Tokens:
    """The tokens of two sequences with their padding, which positions count without."""
    queries, keys = (None if mask is None else mask.to(device) for mask in (queries, keys))
    return Tokens(_counted(queries, n, n, device), _counted(keys, m, m, device), queries, keys)


def self_tokens(ids: Tensor | None, absolute: bool, real: Mask, n: int, m: int, total: int, like: Tensor) -> Tokens:
    """The last n of `total` tokens, which see m keys: a cache may have dropped old ones, or have room.

    `ids` are what the model uses as positions, if that was seen; not `absolute` are those that enter scores as offsets.
    """
    batch, device, shift = len(like), like.device, None
    real = None if real is None or bool(real[:, :total].all()) else real[:, :total].to(device)
    positions = _counted(real, n, total, device) if ids is None else ids.to(device)
    if ids is not None and real is not None and not absolute:
        positions, shift = _from_first(positions, real, n, total)
    keys = positions if n == total else _with_cached(positions, n, total, real)
    queries = None if real is None or n > total else real[:, total - n :]
    if n == total and shift is None:
        positions = keys = _in_one_row(positions, queries)
    if total == m:  # the same tensor at every call, so that what is computed from it can be reused
        return Tokens(positions, keys, queries, real, shift)
    if total < m:
        real = keys.new_ones(batch, total, dtype=torch.bool) if real is None else real
        keys = torch.cat((keys, torch.arange(1, m - total + 1, device=device) + keys[:, -1:]), 1)
    keep = slice(max(total - m, 0), None)
    real = None if real is None else real[:, keep]
    real = None if real is None else pad(real, (0, m - real.shape[1]), value=False)  # free slots hold no token
    return Tokens(positions, keys[:, keep], queries, real, shift)


def so_far(cache: Any, n: int, m: int, real: Mask) -> int:
    """Tokens of a sequence so far, as its cache counts them, or else its mask; m without a cache."""
    if cache is None or not hasattr(cache, "get_seq_length"):
        return m
    total = int(cache.get_seq_length())
    known = total >= n and (real is None or real.shape[1] >= total)
    return total if known else m if real is None else real.shape[1]


def fitting(ids: Tensor | None, batch: int, n: int) -> Shaped[Tensor, "#batch n"] | None:
    """Ids as positions of a call, if they have its shape."""
    if not isinstance(ids, Tensor) or tuple(ids.shape) not in ((n,), (1, n), (batch, n)):
        return None
    return ids.reshape(-1, n) if ids.is_floating_point() else ids.reshape(-1, n).long()


def _in_one_row(positions: Tensor, real: Mask) -> Shaped[Tensor, "#batch n"]:
    """One row for all sequences where they stand alike, which padding does not change: what it gives is reused."""
    alike = _consecutive(0, positions.shape[1], positions.device)
    if positions is alike:  # a comparison would wait for a GPU
        return alike
    same = positions == alike if real is None else (positions == alike) | ~real
    return alike if bool(same.all()) else positions


def _with_cached(positions: Tensor, n: int, total: int, real: Mask) -> Shaped[Tensor, "#batch m"]:
    """Positions of cached keys and of new ones: slots, or real tokens alone, as the first new token counts them."""
    if n > total:
        return positions[:, :total]
    old = total - n
    if real is None:
        return torch.cat((torch.arange(-old, 0, device=positions.device) + positions[:, :1], positions), 1)
    positions, counts = positions.expand(len(real), -1), real.cumsum(1)
    newest = old + real[:, old:].to(torch.uint8).argmax(-1, keepdim=True)
    first = positions.gather(1, newest - old)
    skipped = real.to(torch.uint8).argmax(-1, keepdim=True).where(first != newest, 0)  # padding before the first token
    slots = torch.arange(total, device=real.device) - skipped
    offset = (first - counts.gather(1, newest)).where(real.gather(1, newest), -1)  # a row may have ended
    before = torch.where(first == slots.gather(1, newest), slots, (counts + offset).clamp(min=0))
    return torch.cat((before[:, :old], positions), 1)


def _from_first(ids: Tensor, real: Tensor, n: int, m: int) -> tuple[Shaped[Tensor, "batch n"], Tensor | None]:
    """Ids that are mere slots of left-padded rows, counted from the first real token instead; and what that took."""
    first = real.to(torch.uint8).argmax(-1, keepdim=True)
    slots = (ids == torch.arange(m - n, m, device=ids.device)).all(-1, keepdim=True)
    shift = torch.where(slots, first, 0)
    return (ids - shift, shift) if bool(shift.any()) else (ids, None)


def _counted(real: Mask, n: int, m: int, device: torch.device) -> Int[Tensor, "#batch n"]:
    """Real tokens before each of the last n of m."""
    if real is None:
        return _consecutive(m - n, m, device)
    return (real.to(device).long().cumsum(1) - 1).clamp(min=0)[:, m - n :]


@lru_cache(maxsize=8)
def _consecutive(start: int, end: int, device: torch.device) -> Int[Tensor, "1 n"]:
    """Consecutive positions; cached, so that means rotated to them can be reused."""
    return torch.arange(start, end, device=device)[None]
