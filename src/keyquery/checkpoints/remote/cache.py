"""The local cache of huggingface_hub: found without that library, and offline."""

from __future__ import annotations

import os
import re
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Current names of models that are known by a bare name, without an owner.
OWNERS = {
    "openai-community": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "openai-gpt"),
    "google-bert": ("bert-base-uncased", "bert-base-cased", "bert-large-uncased", "bert-large-cased"),
    "distilbert": ("distilbert-base-uncased", "distilbert-base-cased", "distilgpt2", "distilroberta-base"),
    "FacebookAI": ("roberta-base", "roberta-large", "xlm-roberta-base", "xlm-roberta-large"),
    "google-t5": ("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b"),
    "albert": ("albert-base-v1", "albert-base-v2", "albert-large-v2", "albert-xlarge-v2", "albert-xxlarge-v2"),
}


def cache_folder() -> Path:
    """The cache folder of huggingface_hub: HF_HUB_CACHE, or `hub` in HF_HOME, or in the user's cache."""
    if own := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(own).expanduser()
    around = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(around, "huggingface")).expanduser() / "hub"


def cached(name: str) -> Path | None:
    """The folder of a hub model (org/name) in the local cache, if its weights are there, else None.

    That of the branch main, if it has weights, else the newest that has.
    """
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    first = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    try:
        found = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
    except OSError:
        return None
    found.sort(key=lambda path: (path.name == first, path.stat().st_mtime), reverse=True)
    return next((path for path in found if _has_weights(path)), None)


def located(source: str | Path) -> Path:
    """The path itself, or the folder of a hub model (org/name) in the local cache."""
    named = isinstance(source, str) and HUB_NAME.fullmatch(source) and not Path(source).exists()
    return (cached(str(source)) if named else None) or Path(source)


def _has_weights(folder: Path) -> bool:
    """Whether a folder has weights; missing shards are reported when the model is read."""
    return any(path.suffix in (".safetensors", ".bin", ".pt", ".gguf") and path.exists() for path in folder.iterdir())


def full_names(name: str) -> list[str]:
    """Names on the hub that a bare name may mean: a known one, and those in the local cache."""
    known = [f"{owner}/{name}" for owner, names in OWNERS.items() if name in names]
    folders = cache_folder().glob("models--*--*")
    here = sorted("/".join(folder.name.split("--", 2)[1:]) for folder in folders)
    return list(dict.fromkeys([*known, *(full for full in here if full.partition("/")[2].lower() == name.lower())]))
