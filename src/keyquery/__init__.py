"""keyquery: self-attention as an asymmetric kernel machine.

A head's score is a bilinear form M = QᵀK = S + A: the symmetric part compares, the skew part points.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from keyquery._version import __version__
from keyquery.forms import Form, Rope, ksvd, nystrom
from keyquery.reading import Reading

if TYPE_CHECKING:
    from keyquery import models, testing
    from keyquery.checkpoints import read
    from keyquery.instruments.comparison import compare
    from keyquery.instruments.geometry import look
    from keyquery.layers import Attention, Cache, Decoder, Encoder

# Names outside the core are imported when they are first used: `import keyquery` stays as light as torch allows.
_LAZY = {
    "Attention": "keyquery.layers",
    "Cache": "keyquery.layers",
    "Decoder": "keyquery.layers",
    "Encoder": "keyquery.layers",
    "compare": "keyquery.instruments.comparison",
    "look": "keyquery.instruments.geometry",
    "models": "keyquery.models",
    "read": "keyquery.checkpoints",
    "testing": "keyquery.testing",
}

__all__ = [
    "Attention",
    "Cache",
    "Decoder",
    "Encoder",
    "Form",
    "Reading",
    "Rope",
    "__version__",
    "compare",
    "ksvd",
    "look",
    "models",
    "nystrom",
    "read",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'keyquery' has no attribute {name!r}")
    module = import_module(_LAZY[name])
    return module if _LAZY[name] == f"keyquery.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
