"""Find the models of a survey: folders, files, globs, lists of these, and all checkpoints of a training run."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import has_magic
from itertools import takewhile
from pathlib import Path

from keyquery.checkpoints.reader import weights_in
from keyquery.support.files import read_text

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
LISTS = (".txt", ".lst")
# Words before the number of a step, the most reliable first: epoch=3-step=1000 is step 1000.
WORDS = ("step", "iter", "iteration", "update", "checkpoint", "ckpt", "epoch")
NUMBERED = re.compile(r"([a-z]+?)s?[-_=]?(\d+)(k?)(?![a-z\d])", re.IGNORECASE)
SHARD = re.compile(r"-\d+-of-\d+\.")
DEEPEST = 8  # levels of subfolders that are searched
LONGEST = 100  # bytes of a file name


@dataclass(frozen=True)
class Entry:
    """A model of a survey: its source, its name, and the step and training run that it belongs to."""

    source: str  # an absolute path, or the name of a hub model
    name: str  # unique within the survey
    file: str  # stem of the file names of its page and JSON
    run: str | None = None
    step: int | None = None

    @property
    def key(self) -> str:
        """Folder name of its records, independent of the other models of the survey."""
        return f"{_safe(Path(self.source).name)[:40]}-{_digest(self.source)}"


def find_models(models: Iterable[str | Path]) -> list[Entry]:
    """Resolve arguments of a survey to models, sorted by name.

    A folder stands for its model and its checkpoints, or for every model below it. A text file (.txt, .lst) lists
    models, one per line, with # before comments. A name that does not exist on disk may be a hub model.
    """
    arguments = [str(model) for model in models]
    if not arguments:
        raise ValueError("models must name at least one model, got none")
    lists: set[str] = set()
    sources = list(dict.fromkeys(source for argument in arguments for source in _expand(argument, lists)))
    if not sources:
        raise ValueError(f"{', '.join(arguments)}: these lists name only each other, no models")
    parts = [Path(source).parts for source in sources]
    steps = [_step(part) for part in parts]
    names = unique_names(parts, [_start(part, index) for part, (index, _) in zip(parts, steps, strict=True)])
    runs = _runs(parts, [index for index, _ in steps])
    files = [_safe(name) for name in names]
    often = Counter(file.lower() for file in files)
    entries = [
        Entry(source, name, file if often[file.lower()] == 1 else f"{file}-{_digest(source)}", run, step)
        for source, name, file, run, (_, step) in zip(sources, names, files, runs, steps, strict=True)
    ]
    return sorted(entries, key=lambda entry: entry.name)


def step_of(name: str) -> int | None:
    """The training step in the name of a file or folder, or None."""
    stem = name.removesuffix(Path(name).suffix) if name.endswith(WEIGHTS) else name
    if stem.isascii() and stem.isdigit() and len(stem) < 12:
        return int(stem)
    numbers = {word.lower(): int(number[:15]) * (1000 if k else 1) for word, number, k in NUMBERED.findall(stem)}
    return next((numbers[word] for word in WORDS if word in numbers), None)


def _expand(argument: str, lists: set[str]) -> Iterator[str]:
    """The models that an argument, or a line of a list, stands for; `lists` holds the lists already read."""
    path = Path(argument)
    if path.is_dir():
        models = list(_below(path))
        if not models:
            raise FileNotFoundError(
                f"{argument} and its subfolders hold no weights: no .safetensors, .bin, .pt or .gguf file"
            )
        yield from map(os.path.abspath, models)
    elif path.is_file() and path.suffix in LISTS:
        real = os.path.realpath(path)
        if real in lists:
            return
        lists.add(real)
        lines = [name for line in read_text(path).splitlines() if (name := line.partition("#")[0].strip())]
        if not lines:
            raise ValueError(f"{argument} lists no models: expected one per line")
        yield from (source for line in lines for source in _expand(line, lists))
    elif path.exists() or not has_magic(argument):
        yield os.path.abspath(path) if path.exists() or path.is_absolute() or path.suffix in WEIGHTS else argument
    else:
        matches = sorted(_matches(argument))
        models = [model for match in matches for model in (_below(match) if match.is_dir() else [match])]
        sources = [os.path.abspath(model) for model in models if model.is_dir() or model.suffix in WEIGHTS]
        if not sources:
            raise FileNotFoundError(f"{argument} matches no model: expected folders with weights, or weight files")
        yield from sources


def _matches(pattern: str) -> Iterator[Path]:
    """Paths that a glob matches, except hidden files; ** does not follow links, which may be circular."""
    parts = Path(pattern).parts
    literal = list(takewhile(lambda part: not has_magic(part), parts))
    top = Path(*literal)
    for match in top.glob("/".join(parts[len(literal) :])):
        if not any(part.startswith(".") for part in match.relative_to(top).parts):
            yield match


def _below(top: Path) -> Iterator[Path]:
    """The models in a folder; below a folder that is itself a model, only its checkpoints."""
    seen: set[str] = set()  # links may be circular, or point to the same folder
    folders, links = deque([(top, DEEPEST)]), deque[tuple[Path, int]]()
    while folders or links:
        folder, deep = (folders or links).popleft()  # links last: a model is named by its own path
        if (real := os.path.realpath(folder)) in seen:
            continue
        seen.add(real)
        models = _own(folder)
        yield from models
        for child in sorted(folder.iterdir()) if deep else ():
            is_candidate = not child.name.startswith(".") and (models != [folder] or step_of(child.name) is not None)
            if is_candidate and child.is_dir():
                (links if child.is_symlink() else folders).append((child, deep - 1))


def _own(folder: Path) -> list[Path]:
    """The folder itself if it is one model; its files if each of them is a model."""
    try:
        weights_in(folder)
    except FileNotFoundError:
        return []
    except ValueError:  # several files, and no index
        files = next((candidates for kind in WEIGHTS if (candidates := sorted(folder.glob(f"*{kind}")))), [folder])
        return [folder] if any(SHARD.search(file.name) for file in files) else files
    return [folder]


def _step(parts: Sequence[str]) -> tuple[int, int | None]:
    """Index of the part of a path that names the step, and the step; (0, None) if there is none."""
    for index in range(len(parts) - 1, max(len(parts) - 4, 0), -1):
        if (step := step_of(parts[index])) is not None:
            return index, step
    return 0, None


def _start(parts: Sequence[str], index: int) -> int:
    """Index from which the parts of a path form its name: a checkpoint includes its run, a hub model is in full."""
    return 0 if not Path(*parts).is_absolute() else max(index - 1, 1) if index else len(parts) - 1


def _runs(parts: Sequence[tuple[str, ...]], steps: Sequence[int]) -> list[str | None]:
    """The name of each checkpoint's run: its folder, preceded by parent folders where names would clash."""
    keys = [
        (*part[:where], re.sub(r"\d+", "#", part[where]), *part[where + 1 :]) if where else ()
        for part, where in zip(parts, steps, strict=True)
    ]
    different = list(dict.fromkeys(key for key in keys if key))
    depths = {key: where for key, where in zip(keys, steps, strict=True) if key}
    # Omit the part that names the step, unless runs differ only in it.
    short = [key[: depths[key]] for key in different]
    shown = [key[: depths[key] + 1] if short.count(cut) > 1 else cut for key, cut in zip(different, short, strict=True)]
    full = [key if shown.count(cut) > 1 else cut for key, cut in zip(different, shown, strict=True)]
    names = dict(zip(different, unique_names(full, [depths[key] - 1 for key in different]), strict=True))
    return [names.get(key) for key in keys]


def unique_names(parts: Sequence[tuple[str, ...]], start: Sequence[int]) -> list[str]:
    """The last parts of each path, extended by parent folders until all names are unique."""
    starts = [max(where, 0) for where in start]
    while True:
        names = [_readable("/".join(part[where:])) for part, where in zip(parts, starts, strict=True)]
        often = Counter(names)
        clash = [i for i, name in enumerate(names) if often[name] > 1 and starts[i] > 0]
        if not clash:
            return names
        for i in clash:
            starts[i] -= 1


def _readable(name: str) -> str:
    """A file name as valid UTF-8: file names may hold arbitrary bytes, JSON may not."""
    return name.replace("//", "/").encode(errors="surrogateescape").decode(errors="replace")


def _safe(name: str) -> str:
    """A file name that is valid on any file system."""
    safe = re.sub(r"[^\w.+=-]+", "-", name).strip(".-") or "model"
    return (
        safe if len(safe.encode()) <= LONGEST else f"{safe.encode()[:LONGEST].decode(errors='ignore')}-{_digest(name)}"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:10]
