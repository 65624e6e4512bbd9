"""Attention maps as they come: a listener hears those of some heads at a time, and nothing keeps them.

Modules that ask transformers' attention interface are run head by head through their own eager attention; of other
modules whole maps are heard when they leave the module. Either way a small mark goes on in place of the map, so that
the model's own list of attentions says which were meant, and in which order.
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
NEAR = 0.02  # by which rows of a map may miss a sum of 1: bfloat16 rounds, and nothing else sums to 1 at all


@dataclass(frozen=True)
class Heard:
    """Maps of some heads of one attention: which call it was, of which module, and which positions they could go to."""

    call: int
    module: str
    first: int  # of these heads
    last: bool  # no more heads of this call follow
    maps: Float[Tensor, "batch heads n m"]
    allowed: Bool[Tensor, "#batch all n m"] | None  # for all heads of the call, or one for all; None: everywhere
    real: Bool[Tensor, "batch m"] | None = None  # None: all


Hear = Callable[[Heard], None]


@dataclass
class _Run:
    """One run of a model: who hears, how many calls there were, what is padding."""

    hear: Hear
    masks: dict[str, Tensor]
    calls: int = 0
    modules: list[str] = field(default_factory=list)
    thread: int = field(default_factory=get_ident)  # what other threads run of the same model is not heard

    def begin(self, module: str) -> int:
        self.modules.append(module)
        self.calls += 1
        return self.calls - 1

    def tell(self, call: int, first: int, last: bool, maps: Tensor, allowed: Tensor | None) -> None:
        real = mask_for(self.masks, (len(maps), maps.shape[-1]), "", paired=False)
        self.hear(Heard(call, self.modules[call], first, last, maps, allowed, None if real is None else real.bool()))


# Modules that are listened to: by whom, and under which name.
LISTENING: WeakKeyDictionary[nn.Module, tuple[_Run, str]] = WeakKeyDictionary()


def stream_maps(model: Any, batch: Batch, hear: Hear) -> tuple[list[int], Any]:
    """Run a model on a batch; `hear` gets the attention maps as they come. Which calls are its layers, and its output.

    The calls are those that the model itself returns as its attentions, in order; none where it returns none. The
    model attends eagerly for the call, and is put back. Layers of `kq.Attention` are asked for theirs, all of them.

    >>> heard = []
    >>> stream_maps(kq.Attention(8, 2), {"x": torch.randn(1, 5, 8)}, heard.append)[0]
    [0]
    >>> [(one.first, one.last, tuple(one.maps.shape)) for one in heard]
    [(0, False, (1, 1, 5, 5)), (1, True, (1, 1, 5, 5))]
    """
    model = bare(model) if isinstance(model, nn.Module) else model
    if hasattr(model, "set_attn_implementation"):
        return _of_transformers(model, batch, hear)
    if isinstance(model, nn.Module) and any(isinstance(module, Attention) for module in model.modules()):
        return _of_layers(model, batch, hear)
    raise ValueError(
        f"{type(model).__name__} gives no attention maps: it is no transformers model, and has no kq.Attention in it"
    )


def _of_layers(model: nn.Module, batch: Batch, hear: Hear) -> tuple[list[int], Any]:
    run = _Run(hear, {})

    def ask(name: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert isinstance(module, Attention)
        if get_ident() != run.thread:
            return
        given = signature(Attention.forward).bind(module, *args, **options).arguments
        if given.get("cache") is not None or given.get("offsets") is not None:
            raise ValueError("attention maps are of whole sequences: neither cache nor offsets may be given")
        x, mask, causal = given["x"], given.get("mask"), bool(given.get("is_causal"))
        run.masks = {"attention_mask": mask} if mask is not None and mask.ndim == 2 else {}
        allowed = _allowed(x, mask, causal)
        call = run.begin(name)
        for head, maps in enumerate(module.each_map(x, mask, causal, given.get("positions"))):
            run.tell(call, head, head == module.heads - 1, maps, allowed)

    def listening(stack: ExitStack) -> None:
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                stack.callback(module.register_forward_pre_hook(partial(ask, name), with_kwargs=True).remove)

    with temporarily(model, listening), watch(model, {}) as call_model:
        out = call_model(batch)
    return list(range(run.calls)), out


def _allowed(x: Tensor, mask: Tensor | None, causal: bool) -> Bool[Tensor, "batch all n n"] | None:
    """Which keys each query of a `kq.Attention` may see."""
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
        elif _is_map(part):  # one that left by a way where nobody listens
            order.append(run.begin("attentions"))
            run.tell(order[-1], 0, True, part, _nonzero(part))
    return order, out


def _listen(model: Any, run: _Run, stack: ExitStack) -> None:
    """Let a run hear all attentions of a model, and marks go on in their place."""
    asking = {name: module for name, module in model.named_modules() if uses_interface(module)}
    if asking:
        _register()
        for config in configs_of(model):
            config._attn_implementation_internal = NAME
    else:
        try:
            model.set_attn_implementation("eager")
        except ValueError:
            raise ValueError(f"{type(model).__name__} gives no attention maps: it has no eager path") from None
    for name, module in model.named_modules():
        if name in asking:
            stack.callback(LISTENING.pop, module, None)
            LISTENING[module] = (run, name)
        else:
            # Before any other hook, so that those which collect maps get the mark.
            stack.callback(module.register_forward_hook(partial(_leaving, run, name), prepend=True).remove)


def _register() -> None:
    utils, masks = (optional(f"transformers.{part}", "its attention") for part in ("modeling_utils", "masking_utils"))
    utils.AttentionInterface.register(NAME, _by_heads)
    masks.AttentionMaskInterface.register(NAME, masks.eager_mask)  # without one masks are dropped, without a word


def _by_heads(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
    """A module's own eager attention, one head after the other where heads share nothing but the mask."""
    inner = sys.modules[type(module).__module__].eager_attention_forward  # each family has its own
    run, name = LISTENING.get(module, (None, ""))
    if run is None or get_ident() != run.thread:
        return inner(module, query, key, value, mask, **rest)
    call, heads = run.begin(name), query.shape[1]
    allowed = unmasked(mask, query.shape[-2], key.shape[-2])
    if any(rest.get(name) is not None for name in ("s_aux", "position_bias")) or hasattr(module, "sinks"):
        out, maps = inner(module, query, key, value, mask, **rest)
        run.tell(call, 0, True, maps[..., : key.shape[-2]], allowed)
        return out, _mark(call, query)
    whole = value.new_empty(len(query), query.shape[-2], heads, value.shape[-1])
    for head in range(heads):
        mine, its = slice(head, head + 1), slice(shared := head * key.shape[1] // heads, shared + 1)
        seen = mask if mask is None or mask.shape[1] == 1 else mask[:, mine]
        out, maps = inner(Ungrouped(module), query[:, mine], key[:, its], value[:, its], seen, **rest)
        whole[:, :, mine] = out  # small tensors that stay among large ones that go would leave holes in memory
        run.tell(call, head, head == heads - 1, maps, allowed)
    return whole, _mark(call, query)


def unmasked(mask: Tensor | None, n: int, m: int) -> Bool[Tensor, "batch all n m"] | None:
    """What a mask lets through: one that is added to scores is very low elsewhere."""
    if mask is None:
        return None
    mask = mask[..., :m]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return seen.expand(-1, -1, n, -1)


def _leaving(run: _Run, name: str, module: nn.Module, args: Any, out: Any) -> Any:
    """Hear a map among what leaves a module, and let the mark go on in its place."""
    if type(out) is not tuple or get_ident() != run.thread:
        return None
    found = [place for place, part in enumerate(out) if place and isinstance(part, Tensor) and _is_map(part)]
    if not found:
        return None
    maps, call = out[found[0]], run.begin(name)
    run.tell(call, 0, True, maps, _nonzero(maps))
    return (*out[: found[0]], _mark(call, maps), *out[found[0] + 1 :])


def _is_map(part: Tensor) -> bool:
    """Whether a tensor is attention of tokens to the same tokens: nothing negative, and rows that sum to 1."""
    if part.ndim != 4 or part.shape[-1] != part.shape[-2] or part.numel() < 2 or not part.is_floating_point():
        return False
    near = (part.sum(-1, dtype=torch.float32) - 1).abs() <= NEAR
    return bool(near.all()) and bool(part.min() >= 0)


def _nonzero(maps: Tensor) -> Bool[Tensor, "batch 1 n n"] | None:
    """What any head looks at: where the mask itself is not to be had, what all give exactly nothing is masked."""
    seen = (maps > 0).any(1, keepdim=True)
    return None if bool(seen.all()) else seen


def _mark(call: int, like: Tensor) -> Tensor:
    return torch.full((1, 1, 1, 1), float(call), dtype=torch.float32, device=like.device)
