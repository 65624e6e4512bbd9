"""The type checker that tests run under: shapes as annotated, and an int wherever a float is asked for."""

import re
import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType, NoneType
from typing import Any

import jaxtyping
import numpy as np
import torch
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def names_a_shape(item: Any) -> bool:
    """Whether a type of jaxtyping, or an alias of one, is among the annotations of a function or dataclass."""
    scope = vars(sys.modules[item.__module__])
    words = re.findall(r"\w+", " ".join(map(str, getattr(item, "__annotations__", {}).values())))
    types = (scope.get(word) for word in words)
    shapes = (jaxtyping.AbstractArray, jaxtyping.AbstractDtype)
    return any(isinstance(kind, type) and issubclass(kind, shapes) for kind in types)


def facts(value: Any) -> Any:
    """What decides whether a value is of a type: shape and kind of an array, those of all in a list, plain values."""
    if getattr(value, "is_nested", False):
        return object()  # it has no shape of its own: like none before
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value), tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return type(value), *map(facts, value)
    if isinstance(value, dict):
        return type(value), *((key, facts(part)) for key, part in value.items())
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

    The hook decorates every function, and each call of a decorated one binds its arguments: on tests of forms and
    interventions, checking every call took 20 % more CPU time, and decorating everything 30 to 60 %.
    """

    def decorator_of(*, typechecker: Any) -> Callable[[Any], Any]:
        def decorate(item: Any) -> Any:
            if not names_a_shape(item):
                return item
            checked = jaxtyped(item, typechecker=typechecker)
            return once_for_each_shape(item, checked) if isinstance(item, FunctionType) else checked

        return decorate

    return decorator_of


def install(packages: list[str]) -> None:
    """Check shapes in whatever is imported from these packages from now on."""
    jaxtyping.jaxtyped = only_where_shapes_are(jaxtyping.jaxtyped)  # the name that the hook decorates with
    jaxtyping.install_import_hook(packages, f"{__name__}.checked")
