"""Rotary positions on a grid, as an architecture's facts and a config say them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from keyquery.checkpoints.locations import Location
from keyquery.checkpoints.positions.sequence import rope_base
from keyquery.checkpoints.sources import Source
from keyquery.forms import Rope
from keyquery.forms.rope import AxialRope, Layout

AXES = ("time", "row", "column")
Config = Mapping[str, Any]


def axial_of(location: Location, source: Source, config: Config, head_dim: int) -> AxialRope | None:
    """The rotation on a grid; None where an architecture has none, or where there is no config."""
    attention = location.attention
    if not attention.axes or not config:
        return None
    base, count = rope_base(config, location.layer), len(attention.axes)
    if attention.axes_share:  # one list of frequencies, dealt out to the axes
        all_of_them = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        of_axis = [all_of_them[axis::count] for axis in range(count)]
    else:
        dims = 2 * (head_dim // count // 2)
        of_axis = [base ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)] * count
    frequencies = torch.cat(of_axis)
    axes = torch.cat([torch.full((len(f),), AXES.index(axis)) for f, axis in zip(of_axis, attention.axes, strict=True)])
    if attention.axes_alternate:
        frequencies, axes = (t.reshape(count, -1).mT.flatten() for t in (frequencies, axes))
    rope = Rope(2 * len(frequencies), base, attention.rope == "interleaved", frequencies)
    unplaced = _unplaced(location, source, config, len(frequencies))
    parts = count if attention.rope == "half of axis" else 1
    return AxialRope(rope, axes, _layout(location, config), *unplaced, parts=parts)


def _layout(location: Location, config: Config) -> Layout:
    """See Layout; "window" is in pixels, and "window_but" lists the layers that are not cut into windows.

    "tiles" is the same as "window", in patches.
    """
    facts = {key: _number(value, config) for key, value in location.attention.grid.items()}
    merge, patch = int(facts.get("merge") or 1), _number("patch_size", config)
    return Layout(
        merge=merge,
        window=int(facts["window"]) // merge // patch if facts.get("window") else facts.get("tiles"),
        start=int(facts.get("start", 0)),
        span=facts.get("span"),
        centred=bool(facts.get("centred")),
        patch=patch,
        cut=config["window_size"] if location.layer not in facts.get("window_but", [location.layer]) else None,
    )


def _unplaced(location: Location, source: Source, config: Config, pairs: int) -> tuple[Tensor | None, Tensor | None]:
    """Angles of the tokens before and behind those of the grid: learned, or none."""
    if "unplaced" in location.names:
        return source.rows(location.names["unplaced"]).reshape(-1, pairs), None
    grid = location.attention.grid
    counts = [sum(_number(part, config) for part in grid.get(side, [])) for side in ("before", "after")]
    if "late" in grid and location.layer >= int(config["num_hidden_layers"]) - int(config["num_blocks"]):
        counts[0] += int(_number(grid["late"], config))  # EoMT's queries join in the last layers
    before, after = (torch.zeros(count, pairs) if count else None for count in counts)
    return before, after


def _number(value: Any, config: Config) -> Any:
    """A number, or what a config key says."""
    if not isinstance(value, str):
        return value
    number = config.get(value)
    return number[0] if value == "patch_size" and isinstance(number, (list, tuple)) else number
