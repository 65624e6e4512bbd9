"""Rewrites of the queries and keys of a running model: one listener for all interventions on a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from keyquery.checkpoints.sources import bare
from keyquery.intervene.sites import Rewrite, Site, find_sites
from keyquery.listening.call import Call
from keyquery.listening.exclusive import alone
from keyquery.listening.hooks import Batch, on_output
from keyquery.listening.listen import add_listener


class Rewriting:
    """The sites of a model under intervention, and what is attached to it."""

    def __init__(self, model: nn.Module, sites: dict[int, Site]) -> None:
        self.sites = sites
        self._by_module = {site.module: site for site in sites.values()}
        self.attached = ExitStack()
        with ExitStack() as changes:
            add_listener(model, self.rewritten, changes)
            on_output(model, self.check_called, changes)
            self.attached = changes.pop_all()

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
        if changed is None:
            _CHANGED[model] = Rewriting(model, sites)
        for index, new in rewrites:
            changes.callback(_remove, model, sites[index], new)  # first: an interrupt may come between the two
            sites[index].rewrites.append(new)


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


def _remove(model: nn.Module, site: Site, old: Rewrite) -> None:
    if old in site.rewrites:
        site.rewrites.remove(old)
    changed = _CHANGED.get(model)
    if changed is not None and not any(site.rewrites for site in changed.sites.values()):
        del _CHANGED[model]
        changed.attached.close()
