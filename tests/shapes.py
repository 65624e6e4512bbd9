"""The type checker that tests run under: shapes as annotated, and an int wherever a float is asked for."""

import re
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, NoneType
from typing import Any
from unittest.mock import patch

import jaxtyping
import numpy as np
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import _import_hook

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def names_a_shape(item: Any) -> bool:
    """Whether a type of jaxtyping, or an alias of one, is among the annotations of a function or dataclass."""
    scope = vars(sys.modules[item.__module__])
    words = re.findall(r"\w+", " ".join(map(str, getattr(item, "__annotations__", {}).values())))
    types = (scope.get(word) for word in words)
    shapes = (jaxtyping.AbstractArray, jaxtyping.AbstractDtype)
    return any(isinstance(each, type) and issubclass(each, shapes) for each in types)


def facts(value: Any) -> Any:
    """What decides whether a value is of a type: shape and kind of an array, those of all in a list, plain values."""
    if getattr(value, "is_nested", False):
        return object()  # it has no shape of its own: like none before
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value), tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return type(value), *map(facts, value)
    if isinstance(value, dict):
        return type(value), *((key, facts(each)) for key, each in value.items())
    return value if isinstance(value, (str, int, NoneType)) else type(value)


def once_for_each_shape(function: Callable[..., Any], jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """The function, checked where it is called with arguments of other shapes or types than in any call before.

    To check costs more than most functions do: the same shapes again, in a loop, say nothing new.
    """
    seen = set()

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        if torch.compiler.is_compiling() or jaxtyping.config.jaxtyping_disable:
            return function(*args, **options)
        key = facts(args), facts(options)
        if key in seen:
            return function(*args, **options)
        result = jaxtyped(*args, **options)
        seen.add(key)
        return result

    return call


def only_where_shapes_are(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """Jaxtyping's decorator, left out of functions and dataclasses that name no shape.

    The import hook decorates every function, and each call of a decorated one binds its arguments: some tests would
    spend most of their time on it.
    """

    def decorator_of(*, typechecker: Any) -> Callable[[Any], Any]:
        def decorate(item: Any) -> Any:
            if not names_a_shape(item):
                return item
            checked = jaxtyped(item, typechecker=typechecker)
            return once_for_each_shape(item, checked) if isinstance(item, FunctionType) else checked

        return decorate

    return decorator_of


class Loader(_import_hook._JaxtypingLoader):
    """Jaxtyping's loader, which marks the files of bytecode that hold its checks while their module runs, too.

    So each module of another package that is first imported there is compiled again, and a module that `runpy` runs
    has its checks written into the bytecode of users. Here the mark is on the bytecode of this module alone.
    """

    def get_code(self, fullname: str) -> CodeType | None:
        marked = partial(_import_hook._optimized_cache_from_source, self._typechecker.get_hash())
        with patch("importlib._bootstrap_external.cache_from_source", marked):
            return SourceFileLoader.get_code(self, fullname)

    exec_module = SourceFileLoader.exec_module


def install(packages: list[str]) -> None:
    """Check shapes in whatever is imported from these packages from now on."""
    _import_hook._JaxtypingLoader = Loader
    jaxtyping.jaxtyped = only_where_shapes_are(jaxtyping.jaxtyped)
    jaxtyping.install_import_hook(packages, f"{__name__}.checked")
