"""Rotary positions on a grid, as an architecture's facts and a config say them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from keyquery.checkpoints.family import Place
from keyquery.checkpoints.positions.sequence import rope_base
from keyquery.checkpoints.sources import Source
from keyquery.forms import Rope
from keyquery.forms.rope import AxialRope, Layout

AXES = ("time", "row", "column")
Config = Mapping[str, Any]


def axial_of(place: Place, source: Source, config: Config, head_dim: int) -> AxialRope | None:
    """The rotation on a grid; None where an architecture has none, or where there is no config."""
    attention = place.attention
    if not attention.axes or not config:
        return None
    base, count = rope_base(config, place.layer), len(attention.axes)
    if attention.axes_share:  # one list of frequencies, dealt out to the axes
        all_of_them = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        own = [all_of_them[axis::count] for axis in range(count)]
    else:
        dims = 2 * (head_dim // count // 2)
        own = [base ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)] * count
    frequencies = torch.cat(own)
    axes = torch.cat([torch.full((len(f),), AXES.index(axis)) for f, axis in zip(own, attention.axes, strict=True)])
    if attention.axes_alternate:
        frequencies, axes = (t.reshape(count, -1).mT.flatten() for t in (frequencies, axes))
    rope = Rope(2 * len(frequencies), base, attention.rope == "interleaved", frequencies)
    unplaced = _unplaced(place, source, config, len(frequencies))
    parts = count if attention.rope == "half of axis" else 1
    return AxialRope(rope, axes, _layout(place, config), *unplaced, parts=parts)


def _layout(place: Place, config: Config) -> Layout:
    """See Layout; "window" is in pixels, and "window_but" lists the layers that are not cut into windows.

    "tiles" is the same as "window", in patches.
    """
    facts = {key: _number(value, config) for key, value in place.attention.grid.items()}
    merge, patch = int(facts.get("merge") or 1), _number("patch_size", config)
    return Layout(
        merge=merge,
        window=int(facts["window"]) // merge // patch if facts.get("window") else facts.get("tiles"),
        start=int(facts.get("start", 0)),
        span=facts.get("span"),
        centred=bool(facts.get("centred")),
        patch=patch,
        cut=config["window_size"] if place.layer not in facts.get("window_but", [place.layer]) else None,
    )


def _unplaced(place: Place, source: Source, config: Config, pairs: int) -> tuple[Tensor | None, Tensor | None]:
    """Angles of the tokens before and behind those of the grid: learned, or none."""
    if "unplaced" in place.names:
        return source.rows(place.names["unplaced"]).reshape(-1, pairs), None
    grid = place.attention.grid
    counts = [sum(_number(part, config) for part in grid.get(side, [])) for side in ("before", "after")]
    if "late" in grid and place.layer >= int(config["num_hidden_layers"]) - int(config["num_blocks"]):
        counts[0] += int(_number(grid["late"], config))  # EoMT's queries join in the last layers
    before, after = (torch.zeros(count, pairs) if count else None for count in counts)
    return before, after


def _number(value: Any, config: Config) -> Any:
    """A number, or what a config key says."""
    if not isinstance(value, str):
        return value
    number = config.get(value)
    return number[0] if value == "patch_size" and isinstance(number, (list, tuple)) else number
