"""`keyquery depth`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from keyquery.cli.options import Output, writes
from keyquery.learn.depth.depth import depth as advise


@writes("json", "csv", "picture")
def depth(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model to assess: a folder, a file or a hub model, as for look. Only its shapes are read."
        ),
    ] = None,
    params: Annotated[
        float | None, typer.Option(help="A parameter budget (non-embedding parameters), such as 1.3e9.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Model width; with --layers, a shape to assess.")] = None,
    layers: Annotated[
        int | None, typer.Option(help="Number of layers; given alone, the law's width for this depth.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Vocabulary size; a small one limits the width. Default: no limit.")
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option("--num-heads", help="Number of heads, for bounds on the separation rank. Default: width/64."),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Head width; the model width is a multiple. Default: the best fit.")
    ] = None,
    *,
    output: Output,
) -> None:
    """How deep should a Transformer be? Apply a published law to a budget or a shape.

    The law is ln d = 5.039 + 0.0555·L, for a width d and L layers.

    Examples: `keyquery depth --params 1.3e9` · `keyquery depth --width 2048 --layers 24` ·
    `keyquery depth path/to/model --picture plane.svg`

    It was fitted on decoders of 6 to 48 layers ("Limits to Depth Efficiencies of Self-Attention", 2020); other
    studies found that the shape matters little.
    """
    if model is None and params is None and width is None and layers is None:
        raise ValueError("give a parameter budget (--params 1.3e9), a shape (--width 2048 --layers 24), or a model")
    options: dict[str, Any] = {"model": model, "vocabulary": vocabulary, "heads": heads, "head_dim": head_dim}
    output.deliver(advise(params, width, layers, **options))
