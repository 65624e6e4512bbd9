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

from keyquery.cli.options import Csv, Device, Force, Html, Json, Picture, Quiet, deliver, targets
from keyquery.data import load_images
from keyquery.estimators.inputs.vectors import asked_of, lists_of
from keyquery.estimators.rerank.base import AffinityReranker, AlphaQueryExpansion, ListReranker, check_anchors
from keyquery.estimators.rerank.k_reciprocal import KReciprocalReranker
from keyquery.estimators.rerank.learned import Reranker
from keyquery.estimators.rerank.reading import Shown, reranking_of
from keyquery.support.arrays import read_array
from keyquery.support.checks import check_choice

METHODS: dict[str, Callable[..., ListReranker]] = {
    "affinity": AffinityReranker,
    "expansion": AlphaQueryExpansion,
    "reciprocal": KReciprocalReranker,
}
ENDS = (".npy", ".json")
TOP, ANCHORS = 1024, 512
Lists = Annotated[
    Path | None, typer.Option(help="Lists of a first round of your own, .npy (q, m). Without: exact search.")
]
Method = Annotated[str | None, typer.Option(help="affinity, expansion or reciprocal: they learn nothing.")]
Fit = Annotated[Path | None, typer.Option(help="Learn from these vectors, .npy (n, dim), and their --labels.")]
Labels = Annotated[Path | None, typer.Option(help="With --fit: labels, .npy (n,), numbers or texts.")]
Save = Annotated[Path | None, typer.Option(help="With --fit: save what was learned to this .safetensors file.")]
Top = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="How many of each list to put in order, at most. Without: a model's own, else 1,024.",
    ),
]
Anchors = Annotated[
    int | None,
    typer.Option(min=1, help="With --fit and --method affinity: how many of them all are compared with. Without: 512."),
]
Kernel = Annotated[str | None, typer.Option(help="With --fit: a kernel of kq.Attention. Without: general.")]
Images = Annotated[Path | None, typer.Option(help="Images of the database, to show: an .npz file or a folder.")]


def rerank(
    queries: Annotated[Path, typer.Argument(help="Vectors to search with, .npy (q, dim).")],
    database: Annotated[Path, typer.Argument(help="Vectors to search in, .npy (n, dim).")],
    out: Annotated[
        Path | None, typer.Option(help="Write the lists to this .npy or .json file: places (q, top).")
    ] = None,
    scores: Annotated[Path | None, typer.Option(help="Write their scores to this .npy or .json file.")] = None,
    lists: Lists = None,
    model: Annotated[Path | None, typer.Option(help="A re-ranker that was saved.")] = None,
    method: Method = None,
    fit: Fit = None,
    labels: Labels = None,
    save: Save = None,
    top: Top = None,
    anchors: Anchors = None,
    width: Annotated[int | None, typer.Option(min=1, help="With --fit: the network's width. Without: 768.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="With --fit: steps of training. Without: 400.")] = None,
    kernel: Kernel = None,
    seed: Annotated[int | None, typer.Option(min=0, help="With --fit: the seed. Without: 0.")] = None,
    most: Annotated[int, typer.Option(min=1, help="How many places of each list to show.")] = 10,
    images: Images = None,
    query_images: Annotated[Path | None, typer.Option(help="Images of the queries.")] = None,
    device: Device = "auto",
    json: Json = None,
    csv: Csv = None,
    html: Html = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Put the top of retrieval lists in a better order: candidates that are alike to the same items come first.

    Vectors may be of anything. A re-ranker is learned once, from vectors with labels (--fit), and used on any others
    (--model); --method takes one that learns nothing.
    """
    files = targets(force, out=out, scores=scores, save=save, json=json, csv=csv, html=html, picture=picture)
    _check(model, method, fit, labels, save)
    network = {"width": width, "steps": steps, "kernel": kernel, "seed": seed}
    _check_used(network, anchors, fit is not None, method == "affinity")
    for name in {"out", "scores"} & set(files):
        check_choice(f"the end of --{name}", files[name].suffix.lower(), ENDS)
    asked, there, given = _vectors(queries, database, lists)
    most_there = len(there) if given is None else given.shape[1]
    pictures = {"images": images, "query_images": query_images}
    loaded: dict[str, Any] = {name: load_images(path) for name, path in pictures.items() if path is not None}
    shown = Shown(**loaded)
    shown.check(len(asked), len(there))
    if fit is not None and labels is not None:
        learning = {"top": min(top or TOP, most_there), "anchors": anchors or ANCHORS, "verbose": not quiet}
        check_anchors(learning["anchors"], learning["top"])  # before something is learned that cannot be used
        learning |= {"width": width, "steps": steps, "kernel": kernel, "random_state": seed or 0}
        found = _learned(fit, labels, device, {name: value for name, value in learning.items() if value is not None})
    else:
        found = _taken(model, method, device, anchors or ANCHORS)
    top = min(top or (found.top if fit or model else TOP), most_there)
    before, after, values = found.before_and_after(asked, there, given, top)
    others: dict[str, Callable[[], str | bytes]] = {"save": lambda: _saved(found)}
    others |= {name: partial(_written, files.get(name), part) for name, part in (("out", after), ("scores", values))}
    deliver(reranking_of(repr(found), before, after, values, most, shown), files, quiet, others=others)


def _check(model: Path | None, method: str | None, fit: Path | None, labels: Path | None, save: Path | None) -> None:
    """One of three ways, and what belongs to it."""
    if sum(way is not None for way in (model, method, fit)) != 1:
        raise ValueError("give one of --model FILE, --method NAME, or --fit FEATURES with --labels LABELS")
    if method is not None:
        check_choice("--method", method, tuple(METHODS))
    if (fit is None) != (labels is None):
        raise ValueError("--fit and --labels go together")
    if save is not None and fit is None:
        raise ValueError("--save is for what --fit has learned")


def _check_used(network: Mapping[str, Any], anchors: int | None, learns: bool, compares: bool) -> None:
    """Refuse what was given and would change nothing."""
    if not learns and (idle := [name for name, value in network.items() if value is not None]):
        raise ValueError(f"--{idle[0]} is for --fit: nothing else learns")
    if anchors is not None and not (learns or compares):
        raise ValueError("--anchors is for --fit and --method affinity; a model has its own")


def _vectors(queries: Path, database: Path, lists: Path | None) -> tuple[Any, Any, Any]:
    """Vectors, and lists where there are some, out of their files, checked before anything is learned."""
    asked, there = _array("QUERIES", queries), _array("DATABASE", database)
    asked_of(asked, there, "cpu")
    return asked, there, None if lists is None else lists_of(_array("--lists", lists), len(asked), len(there))


def _learned(fit: Path, labels: Path, device: str, options: dict[str, Any]) -> ListReranker:
    return Reranker(device=device, **options).fit(_array("--fit", fit), _array("--labels", labels))


def _taken(model: Path | None, method: str | None, device: str, anchors: int) -> ListReranker:
    if model is not None:
        return Reranker.load(model, device)
    assert method is not None
    return METHODS[method](device=device, **({"anchors": anchors} if method == "affinity" else {}))


def _array(name: str, path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{name}: there is no file {path}")
    if is_zipfile(path):
        raise ValueError(f"{name}: {path} is an .npz file of several arrays; give an .npy file")
    try:
        return read_array(path)
    except (ValueError, OSError):  # what numpy says of it is advice to trust the file
        raise ValueError(f"{name}: {path} is no .npy file of numbers or texts") from None


def _written(path: Path | None, found: Any) -> str | bytes:
    if path is not None and path.suffix.lower() == ".json":
        return dumps(found.tolist()) + "\n"
    data = io.BytesIO()
    np.save(data, found.numpy(), allow_pickle=False)
    return data.getvalue()


def _saved(found: Any) -> bytes:
    with TemporaryDirectory() as folder:
        found.save(Path(folder, "saved"))
        return Path(folder, "saved").read_bytes()
