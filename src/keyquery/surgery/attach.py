"""Getting between a module's queries and keys and its scores, in the four ways that modules attend.

kq.Attention and modules that ask transformers' attention interface go on with fused attention over the rewritten
queries and keys. Of all others the queries and keys are computed beside the module, and the difference that a rewrite
makes is added to its scores: as the mask of nn.MultiheadAttention, or just before whichever softmax comes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from keyquery.capture.watch import MASKS
from keyquery.layers import Attention, Cache
from keyquery.layers.attend import as_wide, attend
from keyquery.surgery.handles import put
from keyquery.surgery.register import ACTIVE, EAGER, FUSED, register, uses_interface
from keyquery.surgery.sites import Rewrite, Run, Site, find_sites, repeated


@dataclass(eq=False)
class Changed:
    """A model's sites while something is done to them, and the way back."""

    sites: dict[int, Site]
    attached: ExitStack


_CHANGED: WeakKeyDictionary[nn.Module, Changed] = WeakKeyDictionary()


def sites_of(model: nn.Module) -> dict[int, Site]:
    """The sites of a model, those at work if something is done to it already."""
    return _CHANGED[model].sites if model in _CHANGED else find_sites(model)


def rewrite(model: nn.Module, sites: dict[int, Site], rewrites: Mapping[int, Rewrite], changes: ExitStack) -> None:
    """Put rewrites in place, by layer; all is checked before anything is changed."""
    for index, new in rewrites.items():
        taken = {head for old in sites[index].rewrites for head in old.heads}
        if both := sorted(taken & set(new.heads)):
            raise ValueError(f"head {index}.{both[0]} is changed already: undo that first")
    if model not in _CHANGED:
        with ExitStack() as stack:
            _attach(model, sites, stack)
            _CHANGED[model] = Changed(sites, stack.pop_all())
    for index, new in rewrites.items():
        changes.callback(_remove, model, sites[index], new)
        sites[index].rewrites.append(new)


def _remove(model: nn.Module, site: Site, old: Rewrite) -> None:
    if old in site.rewrites:
        site.rewrites.remove(old)
    changed = _CHANGED.get(model)
    if changed is not None and not any(site.rewrites for site in changed.sites.values()):
        del _CHANGED[model]
        changed.attached.close()


def _attach(model: nn.Module, sites: Mapping[int, Site], changes: ExitStack) -> None:
    run = Run()
    _listen(model, sites, run, changes)
    asking = [site for site in sites.values() if _asks(site.module)]
    if asking:
        register()
        for site in asking:
            changes.callback(ACTIVE.pop, site.module, None)
            ACTIVE[site.module] = (site, run)
        _switch(model, changes)
    for site in sites.values():
        if site in asking:
            continue
        if isinstance(site.module, Attention):
            put(site.module, "_attend", _own(site.module, site, run), changes)
        else:
            put(site.module, "forward", _beside(site.module, site, run), changes)
    if any(isinstance(site.module, nn.MultiheadAttention) for site in sites.values()):
        # torch's fused encoder path would bypass the modules.
        changes.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)


def _asks(module: nn.Module) -> bool:
    return not isinstance(module, (Attention, nn.MultiheadAttention)) and uses_interface(module)


def _switch(model: nn.Module, changes: ExitStack) -> None:
    """Every config of the model names our attention; eager ones stay eager, since only they know caps and sinks."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for config in configs.values():
        before = getattr(config, "_attn_implementation_internal", None)
        if hasattr(config, "_attn_implementation_internal"):
            put(config, "_attn_implementation_internal", EAGER if before == "eager" else FUSED, changes)


def _listen(model: nn.Module, sites: Mapping[int, Site], run: Run, changes: ExitStack) -> None:
    """Hear of masks, positions and caches, and see to it that what was changed is really called."""
    signature = inspect.signature(model.forward)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # the call itself will say it better
            given = kwargs
        given = {**given, **given.get("kwargs", {})}
        run.masks = [given[name].bool() for name in MASKS if isinstance(given.get(name), Tensor)]
        for site in sites.values():
            site.calls = 0

    def end(module: nn.Module, args: Any, out: Any) -> None:
        run.masks, run.positions = [], None
        if out is None:  # an exception is on its way
            return
        unheard = [site.name for site in sites.values() if site.rewrites and site.calls == 0]
        if unheard:
            raise RuntimeError(f"{unheard[0]} never asked for its attention: the change has no effect on this model")

    def note(site: Site) -> Callable[..., None]:
        def hear(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = [*args, *kwargs.values()]
            found = next((v for v in values if isinstance(v, Cache) or hasattr(v, "get_seq_length")), None)
            site.cache = getattr(found, "past", found)  # a swapped layer wraps the model's own anew for each call
            if kwargs.get("offsets") is not None:
                raise ValueError("packed sequences cannot be changed: give them as a batch with a mask")
            own = kwargs.get("positions", kwargs.get("position_ids"))
            if isinstance(own, Tensor):
                run.positions = own if own.ndim == 2 else own[None]

        return hear

    def turned(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        at = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        run.positions = at if isinstance(at, Tensor) else None

    hooks = [model.register_forward_pre_hook(begin, with_kwargs=True)]
    hooks.append(model.register_forward_hook(end, always_call=True))
    hooks += [site.module.register_forward_pre_hook(note(site), with_kwargs=True) for site in sites.values()]
    rotary = [module for module in model.modules() if "RotaryEmbedding" in type(module).__name__]
    hooks += [module.register_forward_pre_hook(turned, with_kwargs=True) for module in rotary]
    for hook in hooks:
        changes.callback(hook.remove)


def _own(module: Attention, site: Site, run: Run) -> Callable[..., Any]:
    """The attention of a kq.Attention over rewritten queries and keys."""

    def attend_rewritten(
        query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, visible: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        if not site.rewrites:
            return Attention._attend(module, query, key, value, real, visible, is_causal)
        key, value = (repeated(t, query.shape[1]) for t in (key, value))
        if module.kernel == "rbf":  # what it takes off is a dimension of the key, where the query has 1
            query = torch.cat((query, torch.ones_like(query[..., :1])), -1)
            key = torch.cat((key, key.square().sum(-1, keepdim=True) / -2), -1)
        query, key = site.widen(query, key, run.places(query.shape[-2]), real)
        width = value.shape[-1]
        value = as_wide(value, query.shape[-1])
        dropout = module.dropout if module.training else 0.0
        out, seen = attend(query, key, value, module.scale, real, visible, is_causal, (), dropout)
        return out[..., :width], seen

    return attend_rewritten


def _beside(module: nn.Module, site: Site, run: Run) -> Callable[..., Any]:
    """A forward that adds to the module's scores what the rewrites change of them."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not site.rewrites:
            return plain(*args, **kwargs)
        if isinstance(module, nn.MultiheadAttention):
            return _masked(module, site, run, inspect.signature(plain).bind(*args, **kwargs).arguments)
        entered = args[0] if args else next(v for v in kwargs.values() if isinstance(v, Tensor))
        with Added(_difference(site, run, entered, None)) as added:
            out = plain(*args, **kwargs)
        if not added.used:
            raise RuntimeError(f"{site.name} takes no softmax of its scores: the change has no effect on this model")
        return out

    return forward


def _difference(site: Site, run: Run, x: Tensor, real: Tensor | None) -> Float[Tensor, "batch heads n m"]:
    """What the rewrites change of the scaled scores of tokens x (batch, n, d)."""
    layer, past = site.read(), site.known()
    query, key = (t.flatten(1, 2) for t in layer.project(x))
    key = repeated(key, query.shape[1])
    n, old = x.shape[1], 0 if past is None else past.keys.shape[-2]
    at = run.places(n)
    at = torch.arange(old, old + n, device=x.device)[None] if at is None else at
    query, key = (site.turn.there(t, at.unsqueeze(1)) for t in (query, key))
    key = key if past is None else torch.cat((past.keys, key), -2)
    real = run.real(len(x), old + n) if real is None else real
    wide_query, wide_key = site.widen(query, key, at, real)
    difference = layer.scale * (wide_query @ wide_key.mT - query @ key.mT)
    offsets = torch.arange(old + n) - torch.arange(old, old + n)[:, None]
    bias = site.found.position_bias(layer, offsets.flatten())
    if bias is None:
        return difference
    return difference + ((site.bias_gains() - 1)[:, None, None] * bias.reshape(-1, n, old + n)).to(difference)


def _masked(module: nn.MultiheadAttention, site: Site, run: Run, given: dict[str, Any]) -> Any:
    """nn.MultiheadAttention with the difference as its mask."""
    x, mask, hidden = given["query"], given.get("attn_mask"), given.get("key_padding_mask")
    if given["key"] is not x and not torch.equal(given["key"], x):
        raise ValueError(
            f"{site.name} is called with keys that are not its queries: only self-attention can be changed"
        )
    x = x[None] if x.ndim == 2 else x if module.batch_first else x.transpose(0, 1)
    real = None if hidden is None else hidden.reshape(len(x), -1) == 0  # bool: not hidden; float: nothing is added
    added = _difference(site, run, x, real).flatten(0, 1)
    if mask is not None:
        added = added.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else added + mask
    if hidden is not None and hidden.dtype == torch.bool:  # both masks must be of one kind
        hidden = torch.zeros_like(hidden, dtype=added.dtype).masked_fill(hidden, -torch.inf)
    given |= {"attn_mask": added, "key_padding_mask": hidden, "is_causal": False}
    return nn.MultiheadAttention.forward(module, **given)


class Added(TorchFunctionMode):
    """Within it, a tensor is added to what any softmax, or any fused attention, is taken of."""

    SOFTMAX = (torch.softmax, nn.functional.softmax, Tensor.softmax)
    NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    def __init__(self, difference: Float[Tensor, "batch heads n m"]) -> None:
        super().__init__()
        self.difference, self.used = difference, False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.SOFTMAX:
            self.used = True
            scores = args[0]
            if scores.numel() != self.difference.numel():
                raise ValueError(f"scores of {tuple(scores.shape)} do not fit {tuple(self.difference.shape)}")
            return func(scores + self.difference.reshape(scores.shape).to(scores.dtype), *args[1:], **kwargs)
        if func is nn.functional.scaled_dot_product_attention:
            self.used = True
            given = {**dict(zip(self.NAMES, args, strict=False)), **kwargs}
            return func(**{**given, "attn_mask": self._mask(given), "is_causal": False})
        return func(*args, **kwargs)

    def _mask(self, given: dict[str, Any]) -> Tensor:
        mask, added = given.get("attn_mask"), self.difference.to(given["query"].dtype)
        if given.get("is_causal"):
            mask = torch.ones(added.shape[-2:], dtype=torch.bool, device=added.device).tril()
        if mask is None:
            return added
        return added.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else added + mask
