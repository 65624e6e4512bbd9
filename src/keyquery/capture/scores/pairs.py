"""Queries, keys and the query-key pairs that a running model scores, per layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from keyquery.capture.attention_stream import unmasked
from keyquery.capture.guard import temporarily
from keyquery.capture.hooks import Batch, entry, has_two_sides, mask_for, masks_of, watch
from keyquery.checkpoints import Layer
from keyquery.checkpoints.sources import bare
from keyquery.layers import Attention


@dataclass(frozen=True, eq=False)
class ScoredPairs:
    """One call of a self-attention layer: (scaled) queries and keys before RoPE, and which pairs are scored."""

    query: Float[Tensor, "batch heads n r"]
    key: Float[Tensor, "batch heads n r"]
    positions: Int[Tensor, "#batch n"]
    visible: Bool[Tensor, "#batch any n n"]
    real: Bool[Tensor, "batch n"]


Hear = Callable[[Layer, ScoredPairs], None]


@contextmanager
def watch_pairs(model: nn.Module, heads: Iterable[Layer], hear: Hear) -> Iterator[Callable[[Batch], Any]]:
    """Context whose function runs a batch; `hear` gets every call of every self-attention layer.

    Visible pairs follow the mask that the model passes to the layer (causal, sliding window, padding, packed sequences,
    prefixes); without one, the layer's facts and the padding of the batch.

    >>> heard = []
    >>> model = kq.Attention(8, 2)
    >>> with watch_pairs(model, kq.read(model), lambda layer, pairs: heard.append(pairs)) as run:
    ...     _ = run({"x": torch.randn(1, 5, 8)})
    >>> heard[0].query.shape, int(heard[0].visible.sum())
    (torch.Size([1, 2, 5, 4]), 25)
    """
    model = bare(model)
    modules, thread = dict(model.named_modules()), get_ident()
    arguments: dict[str, dict[str, Any]] = {}  # of the current call, by attention module
    masks: dict[str, Tensor] = {}
    paired = has_two_sides(model)
    layers = [layer for layer in heads if layer.on_data]

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if get_ident() != thread:  # another thread's run of the same model
                return
            try:
                arguments[name] = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
            except TypeError:
                arguments[name] = dict(kwargs)
            arguments[name] |= arguments[name].pop("kwargs", {})

        return hook

    def enter(layer: Layer, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if get_ident() != thread:
                return
            entered = args[0] if args else next(v for v in kwargs.values() if isinstance(v, Tensor))
            if getattr(module, "batch_first", True) is False and entered.ndim == 3:
                entered = entered.transpose(0, 1)
            if entered.ndim == 4 and not layer.by_offset:  # rows and columns of one sequence
                entered = entered.flatten(1, 2)
            tokens = entered.detach().reshape(-1, *entered.shape[-2:]).float()
            real = mask_for(masks, tuple(tokens.shape[:2]), name, paired)
            hear(layer, _scored(layer, tokens, arguments.get(name, {}), real, modules.get(name)))

        return hook

    def run(batch: Batch) -> Any:
        masks.clear()
        masks.update(masks_of(batch))
        return inner(batch)

    def listening(stack: ExitStack) -> None:
        for layer in layers:
            name = _module_name(layer, modules)
            if name in modules and name not in arguments:
                arguments[name] = {}
                stack.callback(modules[name].register_forward_pre_hook(note(name), with_kwargs=True).remove)
            hook = modules[entry(layer)].register_forward_pre_hook(enter(layer, name), with_kwargs=True)
            stack.callback(hook.remove)

    with temporarily(model, listening), watch(model, {}) as inner:
        yield run


def _module_name(layer: Layer, modules: Mapping[str, nn.Module]) -> str:
    """The attention module of a layer; the nope and rope parts of MLA share one."""
    name = layer.name.removesuffix(" (nope)").removesuffix(" (rope)")
    return "" if name == "attention" and name not in modules else name


def _scored(
    layer: Layer, tokens: Tensor, arguments: Mapping[str, Any], real: Tensor | None, module: nn.Module | None
) -> ScoredPairs:
    batch, n = tokens.shape[:2]
    query, key = layer.project(tokens)
    query = (query * layer.scale).flatten(1, 2)
    key = key.expand(*key.shape[:2], layer.heads // key.shape[1], *key.shape[3:]).flatten(1, 2)
    device = tokens.device
    visible = _visible(layer, arguments, n, device, module)
    for name in ("key_padding_mask", "mask"):  # masks passed to the module itself
        own = arguments.get(name)
        if real is None and isinstance(own, Tensor) and own.shape == (batch, n):
            real = own == 0 if name == "key_padding_mask" else own.bool()
    real = torch.ones(batch, n, dtype=torch.bool, device=device) if real is None else real.to(device).bool()
    if not bool(real.all()):
        visible = visible & real[:, None, None, :] & real[:, None, :, None]
    return ScoredPairs(query, key, _positions(arguments, batch, n, device), visible, real)


def _visible(
    layer: Layer, arguments: Mapping[str, Any], n: int, device: torch.device, module: nn.Module | None
) -> Bool[Tensor, "batch any n n"]:
    """Visible pairs, before padding."""
    mask = next((m for name in ("attention_mask", "attn_mask", "mask") if (m := arguments.get(name)) is not None), None)
    causal = layer.causal
    if isinstance(module, Attention):
        causal = bool(arguments.get("is_causal"))
    pairs = torch.ones(1, 1, n, n, dtype=torch.bool, device=device)
    if isinstance(mask, Tensor) and mask.shape[-2:] == (n, n):
        if isinstance(module, nn.MultiheadAttention):
            own = _of_torch(mask)
            return own[None, None] if own.ndim == 2 else own.unflatten(0, (-1, module.num_heads))
        if mask.ndim > 2:
            allowed = unmasked(mask if mask.ndim == 4 else mask.unsqueeze(1), n, n)
            pairs = pairs if allowed is None else pairs & allowed
            if not isinstance(module, Attention):  # combines mask and `is_causal`; other masks are complete
                return pairs
    far = torch.arange(n, device=device) - torch.arange(n, device=device)[:, None]  # key minus query
    if causal:
        pairs = pairs & (far <= 0)
    if layer.window is not None:
        pairs = pairs & (far.abs() < layer.window)
    return pairs


def _of_torch(mask: Tensor) -> Tensor:
    """nn.MultiheadAttention's masks are True, or −∞, where attention is not allowed."""
    return ~mask if mask.dtype == torch.bool else mask > -torch.inf


def _positions(arguments: Mapping[str, Any], batch: int, n: int, device: torch.device) -> Int[Tensor, "batch n"]:
    """Positions of the tokens: those passed to the layer, else 0 to n − 1."""
    for name in ("position_ids", "positions"):
        at = arguments.get(name)
        if isinstance(at, Tensor) and at.shape in ((n,), (1, n), (batch, n)) and not at.is_floating_point():
            at = at.reshape(-1, n).to(device)
            if bool((at >= 0).all()) and int(at.max()) < 4 * n:  # otherwise too sparse for means by position
                return at.long()
    return torch.arange(n, device=device)[None]
