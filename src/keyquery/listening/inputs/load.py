"""Load a live model and its tokenizer through transformers."""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from keyquery.checkpoints.formats.adapters import load_adapter, merge_into
from keyquery.checkpoints.hub import HUB_NAME, full_names, located
from keyquery.checkpoints.sources import read_json
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.layers import LanguageModel
from keyquery.support.devices import pick_device, pick_dtype
from keyquery.support.extras import optional
from keyquery.support.files import beside
from keyquery.support.printable import first_line

# Weights files, and the names under which transformers looks for them.
WEIGHTS = {
    ".safetensors": "model.safetensors",
    **dict.fromkeys((".bin", ".pt", ".pth"), "pytorch_model.bin"),
}
ALTERNATIVES = (
    "from its weights alone it can be read (look without a text), and run as a live module: kq.look(model, inputs=[…])"
)
OFFLINE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
LM_CLASSES = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")  # suffixes of classes with an LM head


def load_model(
    source: str | Path,
    lm_head: bool = False,
    adapter: str | Path | None = None,
    device: Any = None,
    dtype: str | torch.dtype | None = None,
) -> tuple[nn.Module, Any]:
    """Load a model from a folder, a weights file or the local hub cache (org/name), with its tokenizer or None.

    Nothing is downloaded, and no code from the folder is run. Needs the extra `hf`.
    With `lm_head`, the model has its LM head; a LoRA `adapter` is added to its weights. It is put on `device`, default
    the CPU, in `dtype`, default that of its weights.
    """
    target, precision = None if device is None else pick_device(device), pick_dtype(dtype)
    lora = None if adapter is None else load_adapter(adapter)  # before the expensive step
    with _as_folder(located(source)) as path:
        model, tokenizer = _load(source, path, lm_head)
    if lora is not None:
        merge_into(model, lora)
    if precision is not None and any(
        w.dtype != precision for w in model.parameters()
    ):  # .gguf refuses to stay as it is
        model = model.to(precision)
    return model if target is None else model.to(target), tokenizer


@contextmanager
def _as_folder(path: Path) -> Iterator[Path]:
    """The folder of a weights file that lies beside its config; .gguf files and anything else as they are.

    transformers looks for weights by their usual name, so a file of another name is linked under that, in a temporary
    folder with links to the files around it.
    """
    usual = WEIGHTS.get(path.suffix)
    if usual is None or not path.is_file() or not (path.parent / "config.json").is_file():
        yield path
    elif path.name == "model.safetensors":
        yield path.parent
    else:
        with tempfile.TemporaryDirectory() as folder:
            for file in path.parent.iterdir():
                if file.is_file() and file.suffix not in (*WEIGHTS, ".gguf") and not file.name.endswith(".index.json"):
                    Path(folder, file.name).symlink_to(os.path.realpath(file))
            Path(folder, usual).symlink_to(os.path.realpath(path))
            yield Path(folder)


def _load(source: str | Path, path: Path, lm_head: bool) -> tuple[nn.Module, Any]:
    options = _options(path)
    if "gguf_file" in options:
        path = path.parent
    elif not path.exists():
        is_hub = HUB_NAME.fullmatch(str(source)) is not None
        hub = ": a hub model is run from the local cache, where it was not found" if is_hub else ""
        hint = f"; did you mean {meant[0]}?" if (meant := full_names(str(source))) else ""
        raise FileNotFoundError(f"there is no {source}{hub}{hint}")
    elif not path.is_dir() or not (path / "config.json").is_file():
        raise ValueError(f"{source} cannot be run: texts and roles need config.json and a tokenizer beside the weights")
    elif read_json(beside(path, "config.json")).get("model_type") == "keyquery":
        try:
            loaded = LanguageModel.load(path)
        except (OSError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(f"{path} is not a complete keyquery model: {first_line(error)}") from None
        return loaded, Tokenizer.load(path) if (path / "tokenizer.json").exists() else None
    transformers = optional("transformers", "on data")
    with _quiet(transformers):
        try:
            maker = _lm_class(transformers, path, options) if lm_head else transformers.AutoModel
            model, info = maker.from_pretrained(path, output_loading_info=True, **options)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            sizes = "ignore_mismatched_sizes" in str(error)  # its report was printed to a log that is not shown
            why = "the config's sizes are not those of the weights" if sizes else first_line(error)
            if "does not recognize this architecture" in why:
                why = f"it does not know the model type; {ALTERNATIVES}"
            raise ValueError(f"transformers cannot build {source}: {why}") from None
    # Missing weights would be initialised at random; a pooler does not affect attention.
    absent = sorted(name for name in info["missing_keys"] if "pooler" not in name)
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise ValueError(f"{source} cannot be run: missing weights {', '.join(absent[:3])}{more}")
    return model, _stored("AutoTokenizer", path, options)


def in_float32(model: nn.Module) -> nn.Module:
    """The model in float32, converted in place where its weights are of half precision."""
    halves = (torch.float16, torch.bfloat16)
    # Models from .gguf files refuse a conversion that would change nothing.
    return model.float() if any(weight.dtype in halves for weight in model.parameters()) else model


def load_processor(source: str | Path) -> Any:
    """The processor or tokenizer of a model folder; None if there is none."""
    path = located(source)
    if path.is_dir() and read_json(path / "config.json").get("model_type") == "keyquery":
        return Tokenizer.load(path)
    return _stored("AutoProcessor", path, OFFLINE)


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer stored with a model, or None: keyquery's own where supported, else that of transformers."""
    path = located(source)
    if not path.exists():
        return None
    folder = path if path.is_dir() else path.parent
    try:
        return Tokenizer.load(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error):
        return _stored("AutoTokenizer", folder, _options(path))


def _options(path: Path) -> dict[str, Any]:
    return {**OFFLINE, "gguf_file": path.name} if path.suffix == ".gguf" and path.is_file() else OFFLINE


def _stored(maker: str, path: Path, options: dict[str, Any]) -> Any:
    """A tokenizer or processor of transformers; None without one, or if it would be empty because files are missing."""
    transformers = optional("transformers", "its tokenizer")
    with _quiet(transformers):
        try:
            processor = getattr(transformers, maker).from_pretrained(path, **options)
        except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError):
            return None
    tokenizer = getattr(processor, "tokenizer", processor)
    empty = hasattr(tokenizer, "get_vocab") and not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    return None if empty else processor


def has_lm_head(source: str | Path) -> bool:
    """Whether a model folder or .gguf file has an LM head."""
    path = located(source)
    path = path.parent if path.suffix in WEIGHTS and path.is_file() else path
    if path.is_file() or not (path / "config.json").is_file():
        return path.suffix == ".gguf"
    facts = read_json(beside(path, "config.json"))
    return facts.get("model_type") == "keyquery" or any(
        name.endswith(LM_CLASSES) for name in facts.get("architectures") or []
    )


def _lm_class(transformers: Any, path: Path, options: dict[str, Any]) -> Any:
    """The LM class of a checkpoint, by its config."""
    config = transformers.AutoConfig.from_pretrained(path, **options)
    named = [name for name in config.architectures or [] if name.endswith(LM_CLASSES)]
    if named:
        return getattr(transformers, named[0])
    if "gguf_file" in options:
        return transformers.AutoModelForCausalLM
    architectures = ", ".join(config.architectures or ["none"])
    raise ValueError(f"not a language model: it has no LM head, only {architectures}")


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Context that silences the progress bars and logs of transformers."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # some bars of its GGUF reader cannot be disabled
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
