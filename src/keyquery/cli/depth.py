"""`keyquery depth`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from keyquery.cli.options import Csv, Force, Json, Picture, Quiet, deliver, targets
from keyquery.instruments.depth.depth import depth as advise


def depth(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model to judge: a folder, a file or a hub model, as for look. Only its shapes are read."
        ),
    ] = None,
    params: Annotated[
        float | None, typer.Option(help="A budget: parameters without embeddings, such as 1.3e9.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="A width; with --layers, a shape to judge.")] = None,
    layers: Annotated[int | None, typer.Option(help="A number of layers; alone, for the law's width at it.")] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="How many tokens there are, where that is few: it bounds the width that is used.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="How many heads the shape has, for the bounds of its separation rank.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(help="The size of a head, to which the width is rounded.")] = None,
    json: Json = None,
    csv: Csv = None,
    picture: Picture = None,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """How deep is a Transformer to be? The law ln d = 5.039 + 0.0555·L of a budget, or about a shape.

    Examples: `keyquery depth --params 1.3e9` · `keyquery depth --width 2048 --layers 24` ·
    `keyquery depth path/to/model --picture plane.svg`

    The law was fitted on decoders of 6 to 48 layers ("Limits to Depth Efficiencies of Self-Attention", 2020); not all
    who looked found the shape to matter.
    """
    files = targets(force, json=json, csv=csv, picture=picture)
    if model is None and params is None and width is None and layers is None:
        raise ValueError("give a budget (--params 1.3e9), a shape (--width 2048 --layers 24), or a model")
    options: dict[str, Any] = {"model": model, "vocabulary": vocabulary, "heads": heads, "head_dim": head_dim}
    deliver(advise(params, width, layers, **options), files, quiet)
