"""keyquery: self-attention as an asymmetric kernel machine.

A head's score is a bilinear form M = WqᵀWk = S + A: a symmetric part (similarity) and a skew part (direction).
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from keyquery._version import __version__ as __version__

# Public names are listed once, in the stub, where type checkers and editors find them. They are imported when they are
# first used: the command line is up, and can be interrupted, before torch is.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_PUBLIC = {alias.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'keyquery' has no attribute {name!r}")
    module = _PUBLIC[name]
    return (
        import_module(f"{module}.{name}")
        if module in ("keyquery", "keyquery.learn")
        else getattr(import_module(module), name)
    )


def __dir__() -> list[str]:
    return __all__
