"""Every annotation in the library can be read: jaxtyping's shapes are text, and other names exist."""

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

import keyquery as kq

SOURCE = Path(kq.__file__).parent
# What needs triton to be imported is a kernel, whose parameters are constants of the compiler.
MODULES = sorted(
    ".".join(("keyquery", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if path.name != "__main__.py"
)


def annotated(module):
    """The functions, classes and methods that a module defines."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            yield value
            for member in vars(value).values():
                function = getattr(member, "fget", None) or getattr(member, "func", None) or member
                function = getattr(function, "__func__", function)
                written = inspect.isfunction(function) and function.__code__.co_filename != "<string>"  # no dataclass's
                if written and function.__module__ == module.__name__:
                    yield function
        elif inspect.isfunction(value):
            yield value


def for_checkers(module):
    """What a module imports for type checkers alone."""
    tree, names = ast.parse(inspect.getsource(module)), {}
    for block in (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
        exec(compile(ast.Module(block.body, []), module.__name__, "exec"), names)
    return names


@pytest.mark.parametrize("name", MODULES)
def test_annotations_can_be_read(name):
    module = import_module(name)
    for value in annotated(module):
        get_type_hints(value, localns=for_checkers(module))
