"""Rewrites of the queries and keys of a running model: one listener for all interventions on a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from keyquery.checkpoints.sources import bare
from keyquery.intervene.sites import Rewrite, Site, find_sites
from keyquery.listening.call import Call
from keyquery.listening.exclusive import alone, hold
from keyquery.listening.hooks import Batch, on_output
from keyquery.listening.listen import add_listener


class Rewriting:
    """The sites of a model under intervention."""

    def __init__(self, sites: dict[int, Site]) -> None:
        self.sites = sites
        self._by_module = {site.module: site for site in sites.values()}

    def rewritten(self, call: Call) -> Mapping[str, Tensor] | None:
        """What replaces the queries and keys of a call."""
        site = self._by_module.get(call.module)
        if site is None or not site.rewrites:
            return None
        if call.is_cross:
            raise ValueError(f"{site.name} is called with keys other than its queries: only self-attention is changed")
        return site.rewritten(call)

    def check_called(self, *_: Any) -> None:
        """Raise if the attention of a changed module was never called."""
        uncalled = [site.name for site in self.sites.values() if site.rewrites and site.calls == 0]
        if uncalled:
            raise RuntimeError(
                f"{uncalled[0]}: its attention was never called, so the change has no effect (compiled transformers "
                "models bypass it: use the uncompiled model)"
            )


_CHANGED: WeakKeyDictionary[nn.Module, Rewriting] = WeakKeyDictionary()


def check_unchanged(model: nn.Module) -> None:
    """Raise if the model is dialled or projected: measurements would not be of the original."""
    if model in _CHANGED or _shares_sites(model):
        raise ValueError("the model is already dialled or projected: undo that first")


def _shares_sites(model: nn.Module) -> bool:
    """Whether this model's attention is changed through another model that contains it or is contained in it."""
    parts = set(model.modules())
    others = [changed for other, changed in list(_CHANGED.items()) if other is not model]
    return any(site.module in parts for changed in others for site in changed.sites.values())


def sites_of(model: nn.Module, batch: Batch | None = None) -> dict[int, Site]:
    """The sites of a model; the active ones if it is already changed."""
    changed = _CHANGED.get(bare(model))
    return find_sites(bare(model), batch) if changed is None else changed.sites


def rewrite(
    model: nn.Module, sites: dict[int, Site], rewrites: Sequence[tuple[int, Rewrite]], changes: ExitStack
) -> None:
    """Install rewrites of layers; everything is validated before any change."""
    model = bare(model)
    with alone(model):
        changed = _CHANGED.get(model)
        sites = sites if changed is None else changed.sites
        _check(model, sites, rewrites)
        hold(("rewriting", id(model)), partial(_attach, model, sites), changes)
        for index, new in rewrites:
            changes.callback(_remove, sites[index], new)  # first: an interrupt may come between the two
            sites[index].rewrites.append(new)


def _attach(model: nn.Module, sites: dict[int, Site]) -> Callable[[], None]:
    """Attach what all interventions on a model share; returns what removes it."""
    rewriting = Rewriting(sites)
    with ExitStack() as attached:
        add_listener(model, rewriting.rewritten, attached)
        on_output(model, rewriting.check_called, attached)
        _CHANGED[model] = rewriting
        attached.callback(_CHANGED.pop, model, None)
        return attached.pop_all().close


def _check(model: nn.Module, sites: Mapping[int, Site], rewrites: Sequence[tuple[int, Rewrite]]) -> None:
    for index, new in rewrites:
        changed_heads = {head for old in sites[index].rewrites for head in old.heads}
        if both := sorted(changed_heads & set(new.heads)):
            raise ValueError(f"head {index}.{both[0]} is already changed: undo that first")
    if _shares_sites(model):
        raise ValueError(
            "a submodule of the model, or a model that contains it, is dialled or projected: undo that first"
        )
    if not {site.module for site in sites.values()} <= set(model.modules()):
        raise RuntimeError("the model's attention was replaced while it was being read: run one after the other")


def _remove(site: Site, old: Rewrite) -> None:
    if old in site.rewrites:
        site.rewrites.remove(old)
