"""The type checker that tests run under: shapes as annotated, and an int wherever a float is asked for."""

import re
import sys
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def names_a_shape(item: Any) -> bool:
    """Whether a type of jaxtyping, or an alias of one, is among the annotations of a function or dataclass."""
    scope = vars(sys.modules[item.__module__])
    words = re.findall(r"\w+", " ".join(map(str, getattr(item, "__annotations__", {}).values())))
    types = (scope.get(word) for word in words)
    shapes = (jaxtyping.AbstractArray, jaxtyping.AbstractDtype)
    return any(isinstance(each, type) and issubclass(each, shapes) for each in types)


def only_where_shapes_are(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """Jaxtyping's decorator, left out of functions and dataclasses that name no shape.

    The import hook decorates every function, and each call of a decorated one binds its arguments: some tests would
    spend most of their time on it.
    """

    def decorator_of(*, typechecker: Any) -> Callable[[Any], Any]:
        return lambda item: jaxtyped(item, typechecker=typechecker) if names_a_shape(item) else item

    return decorator_of


def install(packages: list[str]) -> None:
    """Check shapes in whatever is imported from these packages from now on."""
    jaxtyping.jaxtyped = only_where_shapes_are(jaxtyping.jaxtyped)
    jaxtyping.install_import_hook(packages, f"{__name__}.checked")
