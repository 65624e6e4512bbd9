"""Transformers' attention interface: who asks it, and what a model names there."""

from __future__ import annotations

from typing import Any

from torch import nn

TABLE = "ALL_ATTENTION_FUNCTIONS"  # what modules call transformers' interface, in the file that they are written in


def uses_interface(module: nn.Module) -> bool:
    """Whether a module asks transformers' interface how to attend: some families do not.

    >>> uses_interface(torch.nn.MultiheadAttention(8, 2))
    False
    """
    return TABLE in getattr(getattr(unwrapped(module), "__code__", None), "co_names", ())


def unwrapped(module: nn.Module) -> Any:
    """The forward of a module's class, without what decorators put around it.

    >>> unwrapped(torch.nn.Linear(1, 1)).__name__
    'forward'
    """
    function: Any = type(module).forward
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


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
