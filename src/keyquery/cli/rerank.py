"""`keyquery rerank`."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import keyquery as kq
from keyquery.cli.options import DEVICE, Device, Option, Output, argument, command, option
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
NETWORK = ("width", "steps", "kernel", "seed")  # options of what is trained


@command(
    *("json", "csv", "html", "picture"),
    queries=argument(Path, "Query vectors, .npy (q, dim)."),
    database=argument(Path, "Database vectors, .npy (n, dim)."),
    out=option(Path | None, "Write the re-ranked lists to this .npy or .json file: indices (q, top)."),
    scores=option(Path | None, "Write their scores to this .npy or .json file."),
    lists=option(Path | None, "First-stage candidate lists (indices), .npy (q, m). Default: exact search."),
    model=option(Path | None, "A saved re-ranker, as written by --save."),
    method=option(str | None, f"Training-free method: {', '.join(METHODS)}."),
    fit=option(Path | None, "Train on these vectors, .npy (n, dim), and their --labels."),
    labels=option(Path | None, "With --fit: labels, .npy (n,), numbers or strings."),
    save=option(Path | None, "With --fit: save the trained re-ranker to this .safetensors file."),
    top=option(
        int | None,
        f"Re-rank at most this many items of each list. Default: the model's own setting, else {TOP:,}.",
        min=1,
    ),
    anchors=option(
        int | None,
        "With --fit or --method affinity: number of top items that every item is compared with. "
        f"Default: {ANCHORS} with --fit, else {PUBLISHED_ANCHORS}, or fewer if lists are shorter.",
        min=1,
    ),
    width=option(int | None, f"With --fit: network width. Default: {WIDTH}.", min=1),
    steps=option(int | None, f"With --fit: training steps. Default: {STEPS}.", min=1),
    kernel=option(str | None, f"With --fit: kernel of kq.Attention. Default: {KERNEL}."),
    seed=option(int | None, "With --fit: random seed. Default: 0.", min=0),
    most=option(int, "Number of ranks of each list to show.", 10, min=1),
    images=option(Path | None, "Images of the database, to display: an .npz file or a folder."),
    query_images=option(Path | None, "Images of the queries, likewise."),
    device=Option(Device, DEVICE),
)
def rerank(
    queries: Path, database: Path, lists: Path | None, top: int | None, most: int, output: Output, **options: Any
) -> None:
    """Re-rank the top of retrieval lists by how similar candidates are to the same items.

    Works on embeddings of any kind. Train a re-ranker once on labelled vectors (--fit, --save) and apply it to others
    (--model), or use a training-free one (--method).
    """
    output = output.also(**{name: options.pop(name) for name in ("out", "scores", "save")})
    files = output.files
    _check(options, "save" in files)
    for name in {"out", "scores"} & set(files):
        check_choice(f"the extension of --{name}", files[name].suffix.lower(), ENDS)
    query_vectors, vectors = _array("QUERIES", queries), _array("DATABASE", database)
    asked_of(query_vectors, vectors, "cpu")  # all is checked before any training
    first = None if lists is None else lists_of(_array("--lists", lists), len(query_vectors), len(vectors))
    pictures: dict[str, Any] = {
        name: load_images(options[name]) for name in ("images", "query_images") if options[name] is not None
    }
    shown = Shown(**pictures)
    shown.check(len(query_vectors), len(vectors))
    available = len(vectors) if first is None else first.shape[1]
    reranker = _reranker(options, min(top or TOP, available), output.quiet)
    top, name = min(top or reranker.top or TOP, available), repr(reranker)
    reranker.verbose = not output.quiet
    before, after, values = reranker.before_and_after(query_vectors, vectors, first, top)
    others: dict[str, Callable[[], str | bytes]] = {"save": lambda: _saved(reranker)}
    others |= {name: partial(_written, files.get(name), part) for name, part in (("out", after), ("scores", values))}
    output.deliver(reranking_of(name, before, after, values, most, shown), others=others)


def _check(options: Mapping[str, Any], saves: bool) -> None:
    """Require exactly one of --model, --method and --fit, and refuse options that would have no effect."""
    if sum(options[way] is not None for way in ("model", "method", "fit")) != 1:
        raise ValueError("give one of --model FILE, --method NAME, or --fit FEATURES with --labels LABELS")
    if options["method"] is not None:
        check_choice("--method", options["method"], tuple(METHODS))
    if (options["fit"] is None) != (options["labels"] is None):
        raise ValueError("--fit and --labels go together")
    if options["fit"] is None:
        if saves:
            raise ValueError("--save requires --fit")
        if unused := [name for name in NETWORK if options[name] is not None]:
            raise ValueError(f"--{unused[0]} requires --fit")
        if options["anchors"] is not None and options["method"] != "affinity":
            raise ValueError("--anchors requires --fit or --method affinity; a saved model has its own setting")


def _reranker(options: Mapping[str, Any], top: int, quiet: bool) -> Any:
    """The re-ranker that was saved, was named, or is trained."""
    device, anchors = options["device"], options["anchors"]
    if options["model"] is not None:
        return kq.Reranker.load(options["model"], device)
    if options["method"] is not None:
        compared = {"anchors": anchors} if options["method"] == "affinity" else {}
        return getattr(kq, METHODS[options["method"]])(device=device, **compared)
    check_anchors(anchors or 1, top)  # before training a re-ranker that could not be used
    settings = {name: options[name] for name in ("width", "steps", "kernel") if options[name] is not None}
    settings["anchors"] = anchors or (top + 1 if top + 1 < ANCHORS else None)
    reranker = kq.Reranker(device=device, top=top, verbose=not quiet, random_state=options["seed"] or 0, **settings)
    return reranker.fit(_array("--fit", options["fit"]), _array("--labels", options["labels"]))


def _array(name: str, path: Path) -> Any:
    try:
        return read_array(path)
    except (ValueError, OSError) as error:
        raise type(error)(f"{name}: {error}") from None


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
