"""Intercepts a module's queries and keys before the scores, for the four ways in which modules compute attention.

kq.Attention and modules on transformers' attention interface continue with fused attention over the rewritten queries
and keys; for all others see `added_scores`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from keyquery.capture.guard import claim, temporarily, uninterrupted
from keyquery.capture.hooks import has_two_sides, masks_of, slow_path
from keyquery.capture.transformers_attention import uses_interface
from keyquery.checkpoints.sources import bare
from keyquery.layers import Attention, Cache
from keyquery.layers.fused import as_wide, attend
from keyquery.surgery.handle import put
from keyquery.surgery.rewriting.added_scores import beside
from keyquery.surgery.rewriting.register import ACTIVE, eagerly, intercept
from keyquery.surgery.rewriting.sites import Rewrite, Run, Site, find_sites, repeated


@dataclass(eq=False)
class Changed:
    """The sites of a model under intervention, and its undo stack."""

    sites: dict[int, Site]
    attached: ExitStack


_CHANGED: WeakKeyDictionary[nn.Module, Changed] = WeakKeyDictionary()


def check_unchanged(model: nn.Module) -> None:
    """Raise if the model is dialled or projected: measurements would not be of the original."""
    if model in _CHANGED or _shares_sites(model):
        raise ValueError("the model is already dialled or projected: undo that first")


def _shares_sites(model: nn.Module) -> bool:
    """Whether this model's attention is changed through another model that contains it or is contained in it."""
    parts = set(model.modules())
    others = [changed for other, changed in list(_CHANGED.items()) if other is not model]
    return any(site.module in parts for changed in others for site in changed.sites.values())


def sites_of(model: nn.Module) -> dict[int, Site]:
    """The sites of a model; the active ones if it is already changed."""
    changed = _CHANGED.get(bare(model))
    return find_sites(bare(model)) if changed is None else changed.sites


def rewrite(model: nn.Module, sites: dict[int, Site], rewrites: Mapping[int, Rewrite], changes: ExitStack) -> None:
    """Install rewrites per layer; everything is validated before any change."""
    model = bare(model)
    with temporarily(model), uninterrupted():
        changed = _CHANGED.get(model)
        sites = sites if changed is None else changed.sites  # another thread may have changed it
        _check(model, sites, rewrites)
        if changed is None:
            with ExitStack() as stack:
                _attach(model, sites, stack)
                _CHANGED[model] = Changed(sites, stack.pop_all())
        for index, new in rewrites.items():
            sites[index].rewrites.append(new)
            changes.callback(_remove, model, sites[index], new)


def _check(model: nn.Module, sites: Mapping[int, Site], rewrites: Mapping[int, Rewrite]) -> None:
    for index, new in rewrites.items():
        changed_heads = {head for old in sites[index].rewrites for head in old.heads}
        if both := sorted(changed_heads & set(new.heads)):
            raise ValueError(f"head {index}.{both[0]} is already changed: undo that first")
    if _shares_sites(model):
        raise ValueError(
            "a submodule of the model, or a model that contains it, is dialled or projected: undo that first"
        )
    if not {site.module for site in sites.values()} <= set(model.modules()):
        raise RuntimeError("the model's attention was replaced while it was being read: run one after the other")


def _remove(model: nn.Module, site: Site, old: Rewrite) -> None:
    if old in site.rewrites:
        site.rewrites.remove(old)
    changed = _CHANGED.get(model)
    if changed is not None and not any(site.rewrites for site in changed.sites.values()):
        del _CHANGED[model]
        changed.attached.close()


def _attach(model: nn.Module, sites: Mapping[int, Site], changes: ExitStack) -> None:
    run = Run(has_two_sides(model))
    claim(model, changes)
    _listen(model, sites, run, changes)
    for site in sites.values():
        if isinstance(site.module, Attention):
            put(site.module, "_attend", Replaced(_own(site.module, site, run)), changes)
        elif not isinstance(site.module, nn.MultiheadAttention) and uses_interface(site.module):
            changes.callback(ACTIVE.pop, site.module, None)
            ACTIVE[site.module] = (site, run)
            intercept(site.module, changes)
        else:
            put(site.module, "forward", Replaced(beside(site.module, site, run)), changes)
    if any(isinstance(site.module, nn.MultiheadAttention) for site in sites.values()):
        slow_path(changes)


def _listen(model: nn.Module, sites: Mapping[int, Site], run: Run, changes: ExitStack) -> None:
    """Hooks that record masks, positions and caches, and check that changed modules are called."""
    hooks: list[Any] = []
    for module in [model, *(part for part in model.modules() if part is not model and _is_model(part))]:
        hooks.append(module.register_forward_pre_hook(_Begin(inspect.signature(module.forward), run), with_kwargs=True))
        hooks.append(module.register_forward_hook(_End(sites if module is model else {}, run), always_call=True))

    def note(site: Site) -> Callable[..., None]:
        def hear(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = [*args, *kwargs.values()]
            cache = next((v for v in values if isinstance(v, Cache) or hasattr(v, "get_seq_length")), None)
            site.cache = getattr(cache, "past", cache)  # a swapped layer wraps the model's cache at each call
            if kwargs.get("offsets") is not None:
                raise ValueError("packed sequences are not supported here: pass a batch with a mask")
            own = kwargs.get("positions", kwargs.get("position_ids"))
            if isinstance(own, Tensor):
                run.positions = own if own.ndim == 2 else own[None]

        return eagerly(hear)

    def record_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        run.positions = positions if isinstance(positions, Tensor) else None

    hooks += [site.module.register_forward_pre_hook(note(site), with_kwargs=True) for site in sites.values()]
    rotary = [module for module in model.modules() if "RotaryEmbedding" in type(module).__name__]
    hooks += [module.register_forward_pre_hook(eagerly(record_positions), with_kwargs=True) for module in rotary]
    for hook in hooks:
        changes.callback(hook.remove)


def _is_model(module: nn.Module) -> bool:
    """Whether a module is a transformers model, which may be called on its own."""
    return hasattr(module, "main_input_name")


class Bound:
    """State bound to one model that must not be copied: a copy would use the original's weights."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("a changed model cannot be copied: undo the change first")

    def __reduce__(self) -> Any:
        raise RuntimeError("a changed model cannot be pickled: undo the change first, or save its state_dict()")


class _Begin(Bound):
    """Pre-hook that records padding masks when a model is called."""

    def __init__(self, signature: inspect.Signature, run: Run) -> None:
        self._signature, self._run = signature, run
        self._hear = eagerly(self._note)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the call."""
        self._hear(args, kwargs)

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            arguments = self._signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # the call itself raises a better error
            arguments = kwargs
        self._run.masks.append(masks_of({**arguments, **arguments.get("kwargs", {})}))


class _End(Bound):
    """Post-hook that drops the masks, and checks that changed modules were called."""

    def __init__(self, sites: Mapping[int, Site], run: Run) -> None:
        self._sites, self._run = sites, run
        self._check = eagerly(self._end)

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        """After the call, also one that failed."""
        self._check(out)

    def _end(self, out: Any) -> None:
        if self._run.masks:
            self._run.masks.pop()
        if out is None or self._run.masks:  # an exception is propagating, or an outer model is still running
            return
        self._run.positions = None
        uncalled = [site.name for site in self._sites.values() if site.rewrites and site.calls == 0]
        if uncalled:
            raise RuntimeError(
                f"{uncalled[0]}: its attention was never called, so the change has no effect (compiled transformers "
                "models bypass it: use the uncompiled model)"
            )


class Replaced(Bound):
    """A replacement for a module's method."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = eagerly(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)


def _own(module: Attention, site: Site, run: Run) -> Callable[..., Any]:
    """The attention of a kq.Attention over rewritten queries and keys."""

    def attend_rewritten(
        query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, visible: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        if not site.rewrites:
            return Attention._attend(module, query, key, value, real, visible, is_causal)
        plain = query, key, value
        key, value = (repeated(t, query.shape[1]) for t in (key, value))
        if module.kernel == "rbf":  # −‖k‖²/2 as a further key dimension, with 1 in the query
            query = torch.cat((query, torch.ones_like(query[..., :1])), -1)
            key = torch.cat((key, key.square().sum(-1, keepdim=True) / -2), -1)
        wide = site.widen(query, key, run.places(query.shape[-2]), real)
        if wide[0] is query and wide[1] is key:
            return Attention._attend(module, *plain, real, visible, is_causal)
        query, key = wide
        width = value.shape[-1]
        value = as_wide(value, query.shape[-1])
        dropout = module.dropout if module.training else 0.0
        out, seen = attend(query, key, value, module.scale, real, visible, is_causal, (), dropout)
        return out[..., :width], seen

    return attend_rewritten
