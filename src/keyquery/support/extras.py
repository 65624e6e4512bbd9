"""Optional packages: imported when they are needed, and where one is missing, the error names its extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# By the name of the module: what pip calls the package, and the extra of keyquery that brings it.
EXTRAS = {
    "PIL": ("Pillow", "images"),
    "distributed": ("dask", "survey"),
    "faiss": ("faiss", "search"),
    "gguf": ("gguf", "gguf"),
    "huggingface_hub": ("huggingface_hub", "hf"),
    "matplotlib": ("matplotlib", "plot"),
    "networkx": ("networkx", "causes"),
    "ot": ("POT", "transport"),
    "pandas": ("pandas", "frames"),
    "pyarrow": ("pyarrow", "survey"),
    "scipy": ("scipy", "estimators"),
    "sklearn": ("scikit-learn", "estimators"),
    "threadpoolctl": ("threadpoolctl", "estimators"),
    "tokenizers": ("tokenizers", "hf"),
    "torch.utils.tensorboard": ("tensorboard", "board"),
    "transformers": ("transformers", "hf"),
    "triton": ("triton", "triton"),
}


def optional(module: str, what: str, package: str | None = None) -> Any:
    """A module of an optional package, for `what` needs it; `package` is another whose extra brings it.

    >>> optional("matplotlib.colors", "plot").to_hex("red")
    '#ff0000'
    """
    try:
        return import_module(module)
    except ImportError as error:
        root = module.partition(".")[0]
        called, extra = EXTRAS.get(module) or EXTRAS[package or root]
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0]
        if missing in (root, called):
            raise ImportError(f"{what} needs {called}: pip install 'keyquery[{extra}]'") from None
        # It is there, and something else is wrong: what it needs itself is missing, or has another version.
        raise ImportError(f"{what} needs {called}, which cannot be imported: {error}") from error
