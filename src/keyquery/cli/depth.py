"""`keyquery depth`."""

from __future__ import annotations

from typing import Any

from keyquery.cli.options import Output, argument, command, option
from keyquery.learn.depth.depth import depth as advise


@command(
    *("json", "csv", "picture"),
    model=argument(
        str | None, "A model to assess: a folder, a file or a hub model, as for look. Only its shapes are read."
    ),
    params=option(float | None, "A parameter budget (non-embedding parameters), such as 1.3e9."),
    width=option(int | None, "Model width; with --layers, a shape to assess."),
    layers=option(int | None, "Number of layers; given alone, the law's width for this depth."),
    vocabulary=option(int | None, "Vocabulary size; a small one limits the width. Default: no limit."),
)
def depth(output: Output, **options: Any) -> None:
    """How deep should a Transformer be? Apply a published law to a budget or a shape.

    The law is ln d = 5.039 + 0.0555·L, for a width d and L layers.

    Examples: `keyquery depth --params 1.3e9` · `keyquery depth --width 2048 --layers 24` ·
    `keyquery depth path/to/model --picture plane.svg`

    It was fitted on decoders of 6 to 48 layers ("Limits to Depth Efficiencies of Self-Attention", 2020); other
    studies found that the shape matters little.
    """
    if all(options[name] is None for name in ("model", "params", "width", "layers")):
        raise ValueError("give a parameter budget (--params 1.3e9), a shape (--width 2048 --layers 24), or a model")
    output.deliver(advise(**options))
