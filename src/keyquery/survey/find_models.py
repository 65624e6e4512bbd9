"""Which models a survey looks at: folders, files, globs, lists of these, and all steps of a training run."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from itertools import takewhile
from pathlib import Path

from keyquery.checkpoints.reader import weights_in
from keyquery.support.files import read_text

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
LISTS = (".txt", ".lst")
# What a step is called, the surest word first: epoch=3-step=1000 is step 1000.
WORDS = ("step", "iter", "iteration", "update", "checkpoint", "ckpt", "epoch")
NUMBERED = re.compile(r"([a-z]+?)s?[-_=]?(\d+)(k?)(?![a-z\d])", re.IGNORECASE)
SHARD = re.compile(r"-\d+-of-\d+\.")
DEEPEST = 8  # folders below the one that is named
LONGEST = 100  # letters of a file's name


@dataclass(frozen=True)
class Entry:
    """A model of a survey: where it lies, what it is called, and which step of which run it is."""

    source: str  # an absolute path, or the name of a hub model
    name: str  # no other model of the survey has it
    file: str  # what its page and its JSON are called, without their endings
    run: str | None = None
    step: int | None = None

    @property
    def key(self) -> str:
        """What its records lie under, whatever else is surveyed."""
        return f"{_safe(Path(self.source).name)[:40]}-{_digest(self.source)}"


def find_models(models: Iterable[str | Path]) -> list[Entry]:
    """The models that are meant, sorted by name.

    A folder is its model, or every model below it; one with weights of its own is also its steps (`checkpoint-500`).
    A text file (.txt, .lst) lists models, one a line, # before a remark. What is not found may be a hub model.
    Folders are entered once, by their own path rather than by a link to it, and lists are read once.

    >>> [entry.name for entry in find_models([kq.models.ENCODER, kq.models.DECODER])]
    ['decoder', 'encoder']
    """
    given = [str(model) for model in models]
    if not given:
        raise ValueError("models must name at least one model, got none")
    lists: set[str] = set()
    sources = list(dict.fromkeys(source for each in given for source in _expand(each, lists)))
    if not sources:
        raise ValueError(f"{', '.join(given)}: lists that name only each other list no models")
    parts = [Path(source).parts for source in sources]
    steps = [_step(part) for part in parts]
    names = _told_apart(parts, [_start(part, at) for part, (at, _) in zip(parts, steps, strict=True)])
    runs = _runs(parts, [at for at, _ in steps])
    files = [_safe(name) for name in names]
    often = Counter(file.lower() for file in files)
    entries = [
        Entry(source, name, file if often[file.lower()] == 1 else f"{file}-{_digest(source)}", run, step)
        for source, name, file, run, (_, step) in zip(sources, names, files, runs, steps, strict=True)
    ]
    return sorted(entries, key=lambda entry: entry.name)


def step_of(name: str) -> int | None:
    """The step that a file or a folder is named by, if it is.

    >>> [step_of(name) for name in ("checkpoint-500", "epoch=3-step=1000.pt", "step20k", "0040", "gpt2")]
    [500, 1000, 20000, 40, None]
    """
    stem = name.removesuffix(Path(name).suffix) if name.endswith(WEIGHTS) else name
    if stem.isascii() and stem.isdigit() and len(stem) < 12:
        return int(stem)
    found = {word.lower(): int(number[:15]) * (1000 if k else 1) for word, number, k in NUMBERED.findall(stem)}
    return next((found[word] for word in WORDS if word in found), None)


def _expand(given: str, lists: set[str]) -> Iterator[str]:
    """The models that are meant by an argument, or by a line of a list; `lists` are those that were read already."""
    path = Path(given)
    if path.is_dir():
        models = list(_below(path))
        if not models:
            raise FileNotFoundError(
                f"{given} holds no weights, nor does a folder in it: no .safetensors, .bin, .pt or .gguf"
            )
        yield from map(os.path.abspath, models)
    elif path.is_file() and path.suffix in LISTS:
        real = os.path.realpath(path)
        if real in lists:
            return
        lists.add(real)
        lines = [name for line in read_text(path).splitlines() if (name := line.partition("#")[0].strip())]
        if not lines:
            raise ValueError(f"{given} lists no models: expected one a line")
        yield from (source for line in lines for source in _expand(line, lists))
    elif path.exists() or not has_magic(given):
        yield os.path.abspath(path) if path.exists() or path.is_absolute() or path.suffix in WEIGHTS else given
    else:
        matches = sorted(_matches(given))
        models = [model for match in matches for model in (_below(match) if match.is_dir() else [match])]
        found = [os.path.abspath(model) for model in models if model.is_dir() or model.suffix in WEIGHTS]
        if not found:
            raise FileNotFoundError(f"{given} matches no model: expected folders with weights, or files of them")
        yield from found


def _matches(pattern: str) -> Iterator[Path]:
    """What a glob matches, but hidden files; ** follows no links, which may lead in circles."""
    if "**" not in Path(pattern).parts:
        yield from map(Path, glob(pattern))
        return
    parts = Path(pattern).parts
    literal = list(takewhile(lambda part: not has_magic(part), parts))
    top = Path(*literal)
    for match in top.glob("/".join(parts[len(literal) :])):
        if not any(part.startswith(".") for part in match.relative_to(top).parts):
            yield match


def _below(top: Path) -> Iterator[Path]:
    """The models in a folder. Below one that is a model itself only its steps are meant."""
    seen: set[str] = set()  # links may lead back, or all to the same place
    folders, links = deque([(top, DEEPEST)]), deque[tuple[Path, int]]()
    while folders or links:
        folder, deep = (folders or links).popleft()  # links last: a model is called by its own path
        if (real := os.path.realpath(folder)) in seen:
            continue
        seen.add(real)
        own = _own(folder)
        yield from own
        for child in sorted(folder.iterdir()) if deep else ():
            meant = not child.name.startswith(".") and (own != [folder] or step_of(child.name) is not None)
            if meant and child.is_dir():
                (links if child.is_symlink() else folders).append((child, deep - 1))


def _own(folder: Path) -> list[Path]:
    """The folder, if it is one model; files, if each is one."""
    try:
        weights_in(folder)
    except FileNotFoundError:
        return []
    except ValueError:  # several files, and no index
        found = next((some for kind in WEIGHTS if (some := sorted(folder.glob(f"*{kind}")))), [folder])
        return [folder] if any(SHARD.search(file.name) for file in found) else found
    return [folder]


def _step(parts: Sequence[str]) -> tuple[int, int | None]:
    """Where in a path the step stands, and which it is; (0, None) where there is none."""
    for at in range(len(parts) - 1, max(len(parts) - 4, 0), -1):
        if (step := step_of(parts[at])) is not None:
            return at, step
    return 0, None


def _start(parts: Sequence[str], at: int) -> int:
    """From where on a path is its name: a step is named with its run, a hub model in full."""
    return 0 if not Path(*parts).is_absolute() else max(at - 1, 1) if at else len(parts) - 1


def _runs(parts: Sequence[tuple[str, ...]], at: Sequence[int]) -> list[str | None]:
    """What each step's run is called: its folder, with those above it where two would be called the same."""
    keys = [
        (*part[:where], re.sub(r"\d+", "#", part[where]), *part[where + 1 :]) if where else ()
        for part, where in zip(parts, at, strict=True)
    ]
    different = list(dict.fromkeys(key for key in keys if key))
    places = {key: where for key, where in zip(keys, at, strict=True) if key}
    # Without the part that is the step; where only that differs, with it.
    short = [key[: places[key]] for key in different]
    shown = [key[: places[key] + 1] if short.count(cut) > 1 else cut for key, cut in zip(different, short, strict=True)]
    full = [key if shown.count(cut) > 1 else cut for key, cut in zip(different, shown, strict=True)]
    called = dict(zip(different, _told_apart(full, [places[key] - 1 for key in different]), strict=True))
    return [called.get(key) for key in keys]


def _told_apart(parts: Sequence[tuple[str, ...]], start: Sequence[int]) -> list[str]:
    """The last parts of each path; with more of them, as many as it takes, where two would be the same."""
    at = [max(where, 0) for where in start]
    while True:
        names = [_readable("/".join(part[where:])) for part, where in zip(parts, at, strict=True)]
        often = Counter(names)
        clash = [i for i, name in enumerate(names) if often[name] > 1 and at[i] > 0]
        if not clash:
            return names
        for i in clash:
            at[i] -= 1


def _readable(name: str) -> str:
    """Names of files may hold bytes that are no text, which no JSON could."""
    return name.replace("//", "/").encode(errors="surrogateescape").decode(errors="replace")


def _safe(name: str) -> str:
    """A name that any file system takes."""
    safe = re.sub(r"[^\w.+=-]+", "-", name).strip(".-") or "model"
    return (
        safe if len(safe.encode()) <= LONGEST else f"{safe.encode()[:LONGEST].decode(errors='ignore')}-{_digest(name)}"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:10]
