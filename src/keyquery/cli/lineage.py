"""`keyquery lineage`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

from keyquery.checkpoints import read
from keyquery.cli.options import PATH, STR, Output, argument, command, option, written
from keyquery.instruments.lineage.fingerprint import Fingerprint, fingerprint
from keyquery.instruments.lineage.index import among as search
from keyquery.instruments.lineage.index import index_files, packed
from keyquery.instruments.lineage.lineage import lineage as compare_weights
from keyquery.reading import Reading
from keyquery.support.files import write_all
from keyquery.support.progress import Progress
from keyquery.survey.find_models import find_models


@command(
    *("json", "csv", "html"),
    models=argument(
        list[str],
        "Two models: folders, files (safetensors, GGUF, torch) or hub models; the second may be made from the "
        "first. With --among one model, with --index any number.",
        metavar="MODELS...",
    ),
    other=option(
        list[str] | None, "Another model that a merge may be made of; may be repeated.", name="--with", metavar=STR
    ),
    among=option(Path | None, "Search for relatives in this folder of models, or in an index.", metavar=PATH),
    index=option(
        Path | None, "Add the models' fingerprints (≤ 200 kB each) to this index.", metavar=PATH, file_okay=False
    ),
)
def lineage(models: list[str], other: list[str] | None, among: Path | None, index: Path | None, output: Output) -> None:
    """Is one model made from another? Compare the spectra and QK forms of all heads.

    Two tests: spectra of every head, which survive a rotated or permuted residual stream and a new order of heads, and
    inner products of the forms themselves. Each has a p-value against unrelated models. Reads queries and keys only.

    Examples: `keyquery lineage BASE MODEL` · `keyquery lineage --index prints models/*` ·
    `keyquery lineage MODEL --among prints`
    """
    _check(models, other, among, index)
    with output.watching() as progress:
        if index is not None:
            _add(models, index, progress, output)
            return
        if among is not None:
            reading: Reading = search(models[0], _prints(among, progress), progress)
        else:
            reading = compare_weights(models[0], models[1], other or (), progress=progress)
    for why in getattr(reading, "skipped", ()):
        warnings.warn(f"left out: {why}", stacklevel=1)
    output.deliver(reading)


def _check(models: list[str], other: list[str] | None, among: Path | None, index: Path | None) -> None:
    if index is not None and (among or other):
        raise ValueError("--index adds models to an index: give it without --among and --with")
    if among is not None and other:
        raise ValueError("--with is for two models: give it without --among")
    if among is not None and not among.is_dir():
        raise NotADirectoryError(f"--among must be a folder, got {among}")
    wanted = "1 model" if among is not None else "2 models"
    if index is None and len(models) != int(wanted[0]):
        raise ValueError(f"expected {wanted}, got {len(models)}")


def _add(models: list[str], index: Path, progress: Progress, output: Output) -> None:
    index.mkdir(parents=True, exist_ok=True)
    for entry in find_models(models):
        path = index / f"{entry.file}.safetensors"
        write_all({path: packed(fingerprint(read(entry.source), progress=progress))})
        if not output.quiet:
            written(path)


def _prints(folder: Path, progress: Progress) -> Iterable[Path | Fingerprint]:
    """The files of an index, or the fingerprints of all models in a folder."""
    if files := index_files(folder):
        return files
    prints, errors = list[Fingerprint](), list[str]()
    for entry in find_models([folder]):
        try:
            prints.append(fingerprint(read(entry.source), progress=progress))
        except (OSError, ValueError) as error:
            errors.append(str(error))
    if not prints:
        raise ValueError(f"no model in {folder} can be compared: {errors[0]}")
    for why in errors:
        warnings.warn(f"left out: {why}", stacklevel=1)
    return prints
