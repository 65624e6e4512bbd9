"""Blocks below a changed one need not be run again: their output is that of the unchanged model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from keyquery.intervene.rewrites import sites_of
from keyquery.listening.hooks import put


class Prefix:
    """The blocks of a model, one per attention layer, and the inputs that some of them had in the unchanged model."""

    def __init__(self, model: nn.Module) -> None:
        sites = sites_of(model)
        modules = [site.module for site in sites.values()]
        stacks = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == len(modules)]
        self._blocks = next(
            (
                dict(zip(sites, stack, strict=True))
                for stack in stacks
                if all(own in set(block.modules()) for own, block in zip(modules, stack, strict=True))
            ),
            None,
        )
        if self._blocks is None:
            raise ValueError(f"{type(model).__name__} has no list of blocks with one attention layer each")
        self._inputs: dict[int, Any] = {}

    @contextmanager
    def kept(self, layers: set[int]) -> Iterator[None]:
        """Keep the inputs of some blocks while the model runs in the context."""
        assert self._blocks is not None
        with ExitStack() as stack:
            for layer in layers:

                def keep(module: nn.Module, args: tuple[Any, ...], layer: int = layer) -> None:
                    self._inputs[layer] = args[0]

                stack.callback(self._blocks[layer].register_forward_pre_hook(keep).remove)
            yield

    @contextmanager
    def skipped(self, layer: int) -> Iterator[None]:
        """Within the context, the blocks below `layer` pass on their input, and it gets the one that was kept."""
        assert self._blocks is not None
        with ExitStack() as stack:
            for below, block in self._blocks.items():
                if below < layer:
                    put(block, "forward", _passed, stack)
            kept = self._inputs[layer]
            hook = self._blocks[layer].register_forward_pre_hook(lambda module, args: (kept, *args[1:]))
            stack.callback(hook.remove)
            yield


def _passed(hidden: Any, *args: Any, **options: Any) -> Any:
    return hidden
