"""`keyquery rerank`."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from zipfile import is_zipfile

import numpy as np
import typer

import keyquery as kq
from keyquery.cli.options import DEVICE, Device, Output, writes
from keyquery.learn.data import load_images
from keyquery.learn.inputs.vectors import asked_of, lists_of
from keyquery.learn.rerank.network import ANCHORS, KERNEL, PUBLISHED_ANCHORS, STEPS, TOP, WIDTH, check_anchors
from keyquery.learn.rerank.reading import Shown, reranking_of
from keyquery.support.arrays import read_array
from keyquery.support.checks import check_choice

# Names in keyquery, imported on use: they need scikit-learn.
METHODS = {
    "affinity": "AffinityReranker",
    "expansion": "AlphaQueryExpansion",
    "reciprocal": "KReciprocalReranker",
    "diffusion": "DiffusionReranker",
}
ENDS = (".npy", ".json")
Lists = Annotated[
    Path | None, typer.Option(help="First-stage candidate lists (indices), .npy (q, m). Default: exact search.")
]
Method = Annotated[str | None, typer.Option(help="Training-free method: affinity, expansion, reciprocal or diffusion.")]
Fit = Annotated[Path | None, typer.Option(help="Train on these vectors, .npy (n, dim), and their --labels.")]
Labels = Annotated[Path | None, typer.Option(help="With --fit: labels, .npy (n,), numbers or strings.")]
Save = Annotated[Path | None, typer.Option(help="With --fit: save the trained re-ranker to this .safetensors file.")]
Top = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Re-rank at most this many items of each list. Default: the model's own setting, else {TOP:,}.",
    ),
]
Anchors = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="With --fit or --method affinity: number of top items that every item is compared with. "
        f"Default: {ANCHORS} with --fit, else {PUBLISHED_ANCHORS}, or fewer if lists are shorter.",
    ),
]
Kernel = Annotated[str | None, typer.Option(help=f"With --fit: kernel of kq.Attention. Default: {KERNEL}.")]
Width = Annotated[int | None, typer.Option(min=1, help=f"With --fit: network width. Default: {WIDTH}.")]
Steps = Annotated[int | None, typer.Option(min=1, help=f"With --fit: training steps. Default: {STEPS}.")]
Images = Annotated[Path | None, typer.Option(help="Images of the database, to display: an .npz file or a folder.")]


@writes("json", "csv", "html", "picture")
def rerank(
    queries: Annotated[Path, typer.Argument(help="Query vectors, .npy (q, dim).")],
    database: Annotated[Path, typer.Argument(help="Database vectors, .npy (n, dim).")],
    out: Annotated[
        Path | None, typer.Option(help="Write the re-ranked lists to this .npy or .json file: indices (q, top).")
    ] = None,
    scores: Annotated[Path | None, typer.Option(help="Write their scores to this .npy or .json file.")] = None,
    lists: Lists = None,
    model: Annotated[Path | None, typer.Option(help="A saved re-ranker, as written by --save.")] = None,
    method: Method = None,
    fit: Fit = None,
    labels: Labels = None,
    save: Save = None,
    top: Top = None,
    anchors: Anchors = None,
    width: Width = None,
    steps: Steps = None,
    kernel: Kernel = None,
    seed: Annotated[int | None, typer.Option(min=0, help="With --fit: random seed. Default: 0.")] = None,
    most: Annotated[int, typer.Option(min=1, help="Number of ranks of each list to show.")] = 10,
    images: Images = None,
    query_images: Annotated[Path | None, typer.Option(help="Images of the queries, likewise.")] = None,
    device: Device = DEVICE,
    *,
    output: Output,
) -> None:
    """Re-rank the top of retrieval lists by how similar candidates are to the same items.

    Works on embeddings of any kind. Train a re-ranker once on labelled vectors (--fit, --save) and apply it to others
    (--model), or use a training-free one (--method).
    """
    output = output.also(out=out, scores=scores, save=save)
    files, quiet = output.files, output.quiet
    _check(model, method, fit, labels, save)
    network = {"width": width, "steps": steps, "kernel": kernel, "seed": seed}
    _check_used(network, anchors, fit is not None, method == "affinity")
    for name in {"out", "scores"} & set(files):
        check_choice(f"the extension of --{name}", files[name].suffix.lower(), ENDS)
    query_vectors, vectors, first_lists = _vectors(queries, database, lists)
    available = len(vectors) if first_lists is None else first_lists.shape[1]
    pictures = {"images": images, "query_images": query_images}
    loaded: dict[str, Any] = {name: load_images(path) for name, path in pictures.items() if path is not None}
    shown = Shown(**loaded)
    shown.check(len(query_vectors), len(vectors))
    if fit is not None and labels is not None:
        most_anchors = min(top or TOP, available) + 1
        check_anchors(anchors or 1, most_anchors - 1)  # before training a re-ranker that could not be used
        settings: dict[str, Any] = {"top": most_anchors - 1, "verbose": not quiet}
        settings["anchors"] = anchors or (most_anchors if most_anchors < ANCHORS else None)
        settings |= {"width": width, "steps": steps, "kernel": kernel, "random_state": seed or 0}
        reranker = _trained(fit, labels, device, {name: value for name, value in settings.items() if value is not None})
    else:
        reranker = _chosen(model, method, device, anchors)
    top, name = min(top or reranker.top or TOP, available), repr(reranker)
    reranker.verbose = not quiet
    before, after, values = reranker.before_and_after(query_vectors, vectors, first_lists, top)
    others: dict[str, Callable[[], str | bytes]] = {"save": lambda: _saved(reranker)}
    others |= {name: partial(_written, files.get(name), part) for name, part in (("out", after), ("scores", values))}
    output.deliver(reranking_of(name, before, after, values, most, shown), others=others)


def _check(model: Path | None, method: str | None, fit: Path | None, labels: Path | None, save: Path | None) -> None:
    """Require exactly one of --model, --method and --fit, with the options that belong to it."""
    if sum(way is not None for way in (model, method, fit)) != 1:
        raise ValueError("give one of --model FILE, --method NAME, or --fit FEATURES with --labels LABELS")
    if method is not None:
        check_choice("--method", method, tuple(METHODS))
    if (fit is None) != (labels is None):
        raise ValueError("--fit and --labels go together")
    if save is not None and fit is None:
        raise ValueError("--save requires --fit")


def _check_used(network: Mapping[str, Any], anchors: int | None, trains: bool, compares: bool) -> None:
    """Refuse options that would have no effect."""
    if not trains and (idle := [name for name, value in network.items() if value is not None]):
        raise ValueError(f"--{idle[0]} requires --fit")
    if anchors is not None and not (trains or compares):
        raise ValueError("--anchors requires --fit or --method affinity; a saved model has its own setting")


def _vectors(queries: Path, database: Path, lists: Path | None) -> tuple[Any, Any, Any]:
    """Vectors, and first-stage lists if any, read from their files and checked before any training."""
    asked, vectors = _array("QUERIES", queries), _array("DATABASE", database)
    asked_of(asked, vectors, "cpu")
    return asked, vectors, None if lists is None else lists_of(_array("--lists", lists), len(asked), len(vectors))


def _trained(fit: Path, labels: Path, device: str, options: dict[str, Any]) -> Any:
    return kq.Reranker(device=device, **options).fit(_array("--fit", fit), _array("--labels", labels))


def _chosen(model: Path | None, method: str | None, device: str, anchors: int | None) -> Any:
    if model is not None:
        return kq.Reranker.load(model, device)
    assert method is not None
    return getattr(kq, METHODS[method])(device=device, **({"anchors": anchors} if method == "affinity" else {}))


def _array(name: str, path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{name}: file not found: {path}")
    if is_zipfile(path):
        raise ValueError(f"{name}: {path} is an .npz file of several arrays; give an .npy file")
    try:
        return read_array(path)
    except (ValueError, OSError):  # numpy's own message suggests to trust the file
        raise ValueError(f"{name}: {path} is not an .npy file of numbers or strings") from None


def _written(path: Path | None, values: Any) -> str | bytes:
    if path is not None and path.suffix.lower() == ".json":
        return dumps(values.tolist()) + "\n"
    data = io.BytesIO()
    np.save(data, values.numpy(), allow_pickle=False)
    return data.getvalue()


def _saved(reranker: Any) -> bytes:
    with TemporaryDirectory() as folder:
        reranker.save(Path(folder, "saved"))
        return Path(folder, "saved").read_bytes()
