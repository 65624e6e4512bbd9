"""Optional packages: the extra that installs each, named where one is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

EXTRAS = {
    "PIL": "images",
    "distributed": "survey",
    "faiss": "search",
    "gguf": "gguf",
    "huggingface_hub": "hf",
    "matplotlib": "plot",
    "networkx": "causes",
    "ot": "transport",
    "pandas": "frames",
    "pyarrow": "survey",
    "scipy": "estimators",
    "sklearn": "estimators",
    "tensorboard": "board",
    "tokenizers": "hf",
    "transformers": "hf",
    "triton": "triton",
}


def optional(module: str) -> Any:
    """An optional module, or an ImportError that names the extra to install.

    >>> optional("json").dumps([1])
    '[1]'
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(missing(error) or str(error)) from None


def missing(error: ModuleNotFoundError) -> str | None:
    """A sentence that names the extra of the package that is missing, if one has it.

    >>> missing(ModuleNotFoundError("No module named 'networkx'", name="networkx"))
    "networkx is not installed: pip install 'keyquery[causes]'"
    """
    package = (error.name or "").split(".")[0]
    return f"{package} is not installed: pip install 'keyquery[{EXTRAS[package]}]'" if package in EXTRAS else None
