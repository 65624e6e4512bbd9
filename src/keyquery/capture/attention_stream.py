"""Attention maps as they are computed: a callback gets those of some heads at a time, and none are kept.

Modules that use transformers' attention interface are run head by head through their own eager attention; maps of other
modules are taken whole from their outputs. Either way a small marker tensor replaces the map, so that the model's own
list of attentions shows which calls were meant, and in which order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from keyquery.capture.guard import put_back, temporarily
from keyquery.capture.hooks import Batch, mask_for, masks_of, watch
from keyquery.capture.transformers_attention import Ungrouped, configs_of, uses_interface
from keyquery.checkpoints.sources import bare
from keyquery.layers import Attention
from keyquery.support.extras import optional

NAME = "keyquery_heard"
NEAR = 0.02  # tolerance of row sums of a map, for bfloat16 rounding


@dataclass(frozen=True)
class Heard:
    """Maps of some heads of one attention call: the call, its module, and the visible positions."""

    call: int
    module: str
    first: int  # index of the first of these heads
    last: bool  # whether these are the last heads of the call
    maps: Float[Tensor, "batch heads n m"]
    allowed: Bool[Tensor, "#batch all n m"] | None  # per head, or one for all; None: everything is visible
    real: Bool[Tensor, "batch m"] | None = None  # non-padding tokens; None: all


Hear = Callable[[Heard], None]


@dataclass
class _Run:
    """One run of a model: its callback, the calls so far, and masks."""

    hear: Hear
    masks: dict[str, Tensor]
    calls: int = 0
    modules: list[str] = field(default_factory=list)
    thread: int = field(default_factory=get_ident)  # calls of other threads are ignored

    def begin(self, module: str) -> int:
        self.modules.append(module)
        self.calls += 1
        return self.calls - 1

    def emit(self, call: int, first: int, last: bool, maps: Tensor, allowed: Tensor | None) -> None:
        real = mask_for(self.masks, (len(maps), maps.shape[-1]), "", paired=False)
        self.hear(Heard(call, self.modules[call], first, last, maps, allowed, None if real is None else real.bool()))


# Modules with a listening run, and their names.
LISTENING: WeakKeyDictionary[nn.Module, tuple[_Run, str]] = WeakKeyDictionary()


def stream_maps(model: Any, batch: Batch, hear: Hear) -> tuple[list[int], Any]:
    """Run a model on a batch, passing attention maps to `hear`; returns the calls of its layers, and its output.

    The calls are those that the model itself returns as attentions, in order; empty if it returns none. The model uses
    eager attention during the run, and is restored. In models built of `kq.Attention` all layers are included.

    >>> heard = []
    >>> stream_maps(kq.Attention(8, 2), {"x": torch.randn(1, 5, 8)}, heard.append)[0]
    [0]
    >>> [(part.first, part.last, tuple(part.maps.shape)) for part in heard]
    [(0, False, (1, 1, 5, 5)), (1, True, (1, 1, 5, 5))]
    """
    model = bare(model) if isinstance(model, nn.Module) else model
    if hasattr(model, "set_attn_implementation"):
        return _of_transformers(model, batch, hear)
    if isinstance(model, nn.Module) and any(isinstance(module, Attention) for module in model.modules()):
        return _of_layers(model, batch, hear)
    raise ValueError(
        f"{type(model).__name__} returns no attention maps: it is neither a transformers model nor has a kq.Attention"
    )


def _of_layers(model: nn.Module, batch: Batch, hear: Hear) -> tuple[list[int], Any]:
    run = _Run(hear, {})

    def ask(name: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert isinstance(module, Attention)
        if get_ident() != run.thread:
            return
        arguments = signature(Attention.forward).bind(module, *args, **options).arguments
        if arguments.get("cache") is not None or arguments.get("offsets") is not None:
            raise ValueError("attention maps need whole sequences: cache and offsets must not be used")
        x = arguments["x"]
        mask = arguments.get("mask")
        causal = bool(arguments.get("is_causal"))
        run.masks = {"attention_mask": mask} if mask is not None and mask.ndim == 2 else {}
        allowed = _allowed(x, mask, causal)
        call = run.begin(name)
        for head, maps in enumerate(module.each_map(x, mask, causal, arguments.get("positions"))):
            run.emit(call, head, head == module.heads - 1, maps, allowed)

    def listening(stack: ExitStack) -> None:
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                stack.callback(module.register_forward_pre_hook(partial(ask, name), with_kwargs=True).remove)

    with temporarily(model, listening), watch(model, {}) as call_model:
        out = call_model(batch)
    return list(range(run.calls)), out


def _allowed(x: Tensor, mask: Tensor | None, causal: bool) -> Bool[Tensor, "batch all n n"] | None:
    """Visible pairs of a `kq.Attention`."""
    n = x.shape[1]
    past = torch.ones(1, 1, n, n, dtype=torch.bool, device=x.device).tril() if causal else None
    if mask is None:
        return past
    pairs = mask[:, None, None] if mask.ndim == 2 else mask.unsqueeze(1) if mask.ndim == 3 else mask
    return pairs.expand(-1, -1, n, -1) if past is None else pairs & past


def _of_transformers(model: Any, batch: Batch, hear: Hear) -> tuple[list[int], Any]:
    run = _Run(hear, masks_of(batch))
    with put_back(model), temporarily(model, partial(_listen, model, run)), watch(model, {}) as call:
        out = call({**batch, "output_attentions": True})  # type: ignore[dict-item]
    listed = getattr(out, "attentions", None) or getattr(out, "encoder_attentions", None) or ()
    listed = tuple(part for part in listed if isinstance(part, Tensor))
    order = []
    for part in listed:
        if part.numel() == 1:
            order.append(int(part))
        elif _is_map(part):  # a map that no hook intercepted
            order.append(run.begin("attentions"))
            run.emit(order[-1], 0, True, part, _nonzero(part))
    return order, out


def _listen(model: Any, run: _Run, stack: ExitStack) -> None:
    """Attach a run to all attention modules of a model; markers replace their maps."""
    asking = {name: module for name, module in model.named_modules() if uses_interface(module)}
    if asking:
        _register()
        for config in configs_of(model):
            config._attn_implementation_internal = NAME
    else:
        try:
            model.set_attn_implementation("eager")
        except ValueError:
            raise ValueError(f"{type(model).__name__} returns no attention maps: it has no eager attention") from None
    for name, module in model.named_modules():
        if name in asking:
            stack.callback(LISTENING.pop, module, None)
            LISTENING[module] = (run, name)
        else:
            # Before any other hook, so that hooks that collect maps get the marker.
            stack.callback(module.register_forward_hook(partial(_leaving, run, name), prepend=True).remove)


def _register() -> None:
    utils, masks = (optional(f"transformers.{part}", "its attention") for part in ("modeling_utils", "masking_utils"))
    utils.AttentionInterface.register(NAME, _by_heads)
    masks.AttentionMaskInterface.register(NAME, masks.eager_mask)  # otherwise masks are silently dropped


def _by_heads(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
    """A module's own eager attention, one head at a time where heads share nothing but the mask."""
    inner = sys.modules[type(module).__module__].eager_attention_forward  # each architecture has its own
    run, name = LISTENING.get(module, (None, ""))
    if run is None or get_ident() != run.thread:
        return inner(module, query, key, value, mask, **rest)
    call, heads = run.begin(name), query.shape[1]
    allowed = unmasked(mask, query.shape[-2], key.shape[-2])
    if any(rest.get(name) is not None for name in ("s_aux", "position_bias")) or hasattr(module, "sinks"):
        out, maps = inner(module, query, key, value, mask, **rest)
        run.emit(call, 0, True, maps[..., : key.shape[-2]], allowed)
        return out, _marker(call, query)
    whole = value.new_empty(len(query), query.shape[-2], heads, value.shape[-1])
    for head in range(heads):
        mine, of_group = slice(head, head + 1), slice(shared := head * key.shape[1] // heads, shared + 1)
        seen = mask if mask is None or mask.shape[1] == 1 else mask[:, mine]
        out, maps = inner(Ungrouped(module), query[:, mine], key[:, of_group], value[:, of_group], seen, **rest)
        whole[:, :, mine] = out  # preallocated: small live tensors would fragment memory
        run.emit(call, head, head == heads - 1, maps, allowed)
    return whole, _marker(call, query)


def unmasked(mask: Tensor | None, n: int, m: int) -> Bool[Tensor, "batch all n m"] | None:
    """Visible pairs of a boolean or additive mask."""
    if mask is None:
        return None
    mask = mask[..., :m]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return seen.expand(-1, -1, n, -1)


def _leaving(run: _Run, name: str, module: nn.Module, args: Any, out: Any) -> Any:
    """Emit a map among a module's outputs, and replace it by a marker."""
    if type(out) is not tuple or get_ident() != run.thread:
        return None
    indices = [index for index, part in enumerate(out) if index and isinstance(part, Tensor) and _is_map(part)]
    if not indices:
        return None
    maps, call = out[indices[0]], run.begin(name)
    run.emit(call, 0, True, maps, _nonzero(maps))
    return (*out[: indices[0]], _marker(call, maps), *out[indices[0] + 1 :])


def _is_map(part: Tensor) -> bool:
    """Whether a tensor is a self-attention map: non-negative, with rows that sum to 1."""
    if part.ndim != 4 or part.shape[-1] != part.shape[-2] or part.numel() < 2 or not part.is_floating_point():
        return False
    near = (part.sum(-1, dtype=torch.float32) - 1).abs() <= NEAR
    return bool(near.all()) and bool(part.min() >= 0)


def _nonzero(maps: Tensor) -> Bool[Tensor, "batch 1 n n"] | None:
    """Visible pairs where the mask is unknown: those with weight above 0 in any head; None if all."""
    seen = (maps > 0).any(1, keepdim=True)
    return None if bool(seen.all()) else seen


def _marker(call: int, like: Tensor) -> Tensor:
    return torch.full((1, 1, 1, 1), float(call), dtype=torch.float32, device=like.device)
