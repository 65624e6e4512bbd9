"""Transformers' attention interface: which modules use it, and what a model's configs name."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import nn

TABLE = "ALL_ATTENTION_FUNCTIONS"  # name of transformers' interface in modeling files


def uses_interface(module: nn.Module) -> bool:
    """Whether a module uses transformers' attention interface; some architectures do not."""
    names = getattr(getattr(unwrapped(module), "__code__", None), "co_names", ())
    asks = "get_interface" in names or "getattr" not in names  # getattr(TABLE, name, eager) is always eager
    return TABLE in names and asks


def unwrapped(module: nn.Module) -> Any:
    """The undecorated forward of a module's class."""
    return _undecorated(type(module).forward)


@lru_cache(maxsize=512)
def _undecorated(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def configs_of(model: nn.Module) -> list[Any]:
    """Every config in a model that names an attention implementation, each once; submodels have their own."""
    queue = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    configs: dict[int, Any] = {}
    while queue:
        config = queue.pop(0)
        if id(config) not in configs and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
            queue += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
    return list(configs.values())
