"""Transformers' attention interface: who asks it, what a model names there, and how that is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def uses_interface(module: nn.Module) -> bool:
    """Whether a module asks transformers' interface how to attend: some families do not.

    >>> uses_interface(torch.nn.MultiheadAttention(8, 2))
    False
    """
    function: Any = type(module).forward
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(function, "__code__", None), "co_names", ())


class Ungrouped:
    """A module as attention functions see it, its keys repeated already."""

    num_key_value_groups = 1

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def configs_of(model: nn.Module) -> list[Any]:
    """Every config in a model that names an attention implementation, each once; towers have their own."""
    waiting = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    found: dict[int, Any] = {}
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            waiting += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
    return list(found.values())


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Whatever implementations a model's configs name within, afterwards they name what they did before.

    >>> with put_back(torch.nn.Linear(2, 2)):
    ...     pass
    """
    before = [(config, config._attn_implementation_internal) for config in configs_of(model)]
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
