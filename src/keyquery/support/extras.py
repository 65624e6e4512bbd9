"""Optional packages: imported on use; if one is missing, the error names the extra to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Module name → name of the package on PyPI, and the extra of keyquery that installs it.
EXTRAS = {
    "PIL": ("Pillow", "images"),
    "distributed": ("dask", "survey"),
    "gguf": ("gguf", "gguf"),
    "huggingface_hub": ("huggingface_hub", "hf"),
    "matplotlib": ("matplotlib", "plot"),
    "ot": ("POT", "transport"),
    "pandas": ("pandas", "frames"),
    "pyarrow": ("pyarrow", "survey"),
    "sklearn": ("scikit-learn", "estimators"),
    "threadpoolctl": ("threadpoolctl", "estimators"),
    "tokenizers": ("tokenizers", "hf"),
    "torch.utils.tensorboard": ("tensorboard", "board"),
    "transformers": ("transformers", "hf"),
    "triton": ("triton", "triton"),
}


def optional(module: str, what: str) -> Any:
    """Import a module of an optional package."""
    try:
        return import_module(module)
    except ImportError as error:
        root = module.partition(".")[0]
        distribution, extra = EXTRAS.get(module) or EXTRAS.get(root, (root, ""))
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0]
        if missing in (root, distribution):
            target = f"'keyquery[{extra}]'" if extra else distribution
            raise ImportError(f"{what} needs {distribution}: pip install {target}") from None
        # It is installed, but one of its own dependencies is missing or has the wrong version.
        raise ImportError(f"{what} needs {distribution}, which cannot be imported: {error}") from error
