"""Weights of an unknown architecture, by user-supplied tensor names and layout."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from keyquery.checkpoints.coverage import FUSED
from keyquery.checkpoints.family import Attention, Family
from keyquery.checkpoints.heads import EMBEDDED
from keyquery.checkpoints.locations import Location, locations
from keyquery.checkpoints.sources import Source
from keyquery.support.checks import check_choice
from keyquery.support.printable import NAME, printable

# Layouts of query and key weights, and their Attention options; d is the width of the model, r that of a head.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("(heads·r, d), as nn.Linear stores it", {}),
    "transposed": ("(d, heads·r), as Flax stores it", {"transposed": True}),
    "heads": ("(heads, d, r), as TransformerLens stores W_Q", {"order": "heads", "transposed": True}),
    "heads-linear": ("(heads, r, d)", {"order": "heads"}),
    "columns": ("(d, heads, r), as Flax's DenseGeneral", {"order": "columns"}),
    "fused": ("one tensor (3·heads·r, d): all queries, all keys, all values", {"order": "blocks"}),
    "fused-transposed": ("(d, 3·heads·r), as GPT-2's c_attn", {"order": "blocks", "transposed": True}),
    "fused-heads": ("(heads·3·r, d): query, key and value head by head, as GPT-NeoX", {"order": "groups"}),
}
THREE = ("heads", "columns")  # orders of tensors with three dimensions
WIDTHS = ("hidden_size", "n_embd", "d_model")
MOST_NAMES, MOST_PATTERNS = 6, 12  # in a message
MOST_COMPARED, LONGEST = 2_000, 200  # tensors, and letters of their names, to guess from


def custom_family(source: Source, query: str | None, key: str | None, layout: str | None) -> Family:
    """A Family of one Attention whose tensors are named by patterns with {layer} in them, checked against the source.

    Default layout: "linear" for matrices; other layouts must be stated.
    """
    if layout is not None:
        check_choice("layout", layout, tuple(LAYOUTS))
    fused = layout is not None and layout.startswith("fused")
    if query is None or (key is None and not fused):
        raise ValueError("query and key patterns go together; one alone needs a fused layout (--layout fused)")
    if fused and key not in (None, query):
        raise ValueError(f"layout {layout!r} is of one tensor, but key names another: {key!r} beside {query!r}")
    if layout is None and query == key:
        raise ValueError(
            f"query and key both name {query!r}: if that tensor holds queries, keys and values, say "
            "--layout fused, fused-transposed or fused-heads; if keys are the queries, --layout linear"
        )
    key = query if key is None else key
    if any(pattern(name) == query for name in source.shapes):  # as it is, not behind any prefix
        query, key = f"/{query}", f"/{key}"
    suffix = ".weight" if query.endswith(".weight") and key.endswith(".weight") else ""
    query, key = query.removesuffix(suffix), key.removesuffix(suffix)
    names: dict[str, str | list[str]] = {"fused": query} if fused else {"query": query, "key": key}
    facts = LAYOUTS[layout or "linear"][1]
    family = Family("custom", [], [Attention([names], weight=suffix, **facts)])
    for location in locations(family, source.shapes, source.config):
        _check(location, source, layout)
    return family


def _check(location: Location, source: Source, layout: str | None) -> None:
    """Raise if tensors do not have the dimensions of the layout or the width of the model."""
    attention = location.attention
    dims = 3 if attention.order in THREE else 2
    for role in ("query", "key", "fused"):
        if role not in location.names:
            continue
        name = location.names[role] + attention.weight
        shape = tuple(source.shapes[name])
        if len(shape) != dims:
            raise ValueError(f"{name} has the shape {shape}, which is not {_stated(layout)}; {_others(len(shape))}")
        first = attention.order == "columns"
        width = shape[0] if first else shape[-2] if attention.transposed else shape[-1]
        where, known = _width(source, layout)
        if known is not None and width != known:
            raise ValueError(
                f"{name} of shape {shape} would be {width} wide as {_stated(layout)}, but {where} is {known}; "
                f"{_others(dims)}"
            )


def _width(source: Source, layout: str | None) -> tuple[str, int | None]:
    """The width of the model and its source: the config, or the token embeddings if no layout is stated."""
    for name in WIDTHS:
        if isinstance(said := source.config.get(name), int):
            return f"the config's {name}", said
    named: Mapping[str, Any] = {} if layout else source.shapes
    for name, shape in named.items():
        if name.endswith(EMBEDDED) and len(shape) == 2:
            return f"the width of {name}", shape[1]
    return "", None


def _stated(layout: str | None) -> str:
    return f"layout {layout or 'linear'!r}, {LAYOUTS[layout or 'linear'][0].split(', as ')[0]}"


def _others(dims: int) -> str:
    """Layouts with this number of dimensions."""
    fitting = [name for name, (_, facts) in LAYOUTS.items() if ((facts.get("order") in THREE) == (dims == 3))]
    shown = (
        "; ".join(f"{name}: {LAYOUTS[name][0]}" for name in fitting) if dims in (2, 3) else "none has its dimensions"
    )
    return f"--layout says how it is stored ({shown})"


def example(source: Source) -> str:
    """How to name the weights of a source: by the tensors that look like queries and keys, if there are any."""
    if (pair := likely_pair(source)) is not None:
        layout = _likely_layout(next(name for name in source.shapes if pattern(name) == pair[0]), source)
        return f", perhaps by --query {pair[0]!r} --key {pair[1]!r}{layout} --num-heads N"
    fused = next((name for name in sorted(source.shapes) if name.removesuffix(".weight").split(".")[-1] in FUSED), None)
    if fused is not None:
        leaf = fused.removesuffix(".weight").rpartition(".")[2]
        usual = {"linear_qkv": "fused-heads", "query_key_value": "fused-heads", "c_attn": "fused-transposed"}
        layout = usual.get(leaf, "fused")
        return f", perhaps by --query {printable(pattern(fused), NAME)!r} --layout {layout} --num-heads N"
    return " with --query PATTERN --key PATTERN --num-heads N, with {layer} in the patterns"


def _likely_layout(name: str, source: Source) -> str:
    """The layout that a tensor's name and shape speak for, as an option; nothing for the default."""
    kernel, dims = name.endswith("kernel"), len(source.shapes[name])
    layout = {(False, 3): "heads", (True, 3): "columns", (True, 2): "transposed"}.get((kernel, dims))
    return "" if layout is None else f" --layout {layout}"


def likely_pair(source: Source) -> tuple[str, str] | None:
    """Patterns of the first two tensors whose names differ in a q and a k only; None without such."""
    for name in sorted(source.shapes):
        for letters, others in (("query", "key"), ("q", "k"), ("Q", "K")):
            for match in re.finditer(letters, name):
                other = name[: match.start()] + others + name[match.end() :]
                if other in source.shapes and len(source.shapes[name]) > 1:
                    return printable(pattern(name), NAME), printable(pattern(other), NAME)
    return None


def pattern(name: str) -> str:
    """The name of a tensor with {layer} for its first number."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "{layer}", name, count=1)


def shown(source: Source) -> str:
    """Names of a source's tensors: patterns of the matrices that several layers have, else the first names."""
    counts = Counter(pattern(name) for name, shape in source.shapes.items() if len(shape) > 1)
    repeated = sorted(name for name, count in counts.items() if count > 1 and "{layer}" in name)
    names = repeated[:MOST_PATTERNS] or sorted(source.shapes)[:MOST_NAMES]
    more = f", … ({len(source.shapes)} in all)" if names != sorted(source.shapes) else ""
    return (", ".join(printable(name, NAME) for name in names) or "no tensors") + more


def meant(source: Source, query: str | None) -> str:
    """A guess at what a pattern was to name, for an error message; empty without any."""
    matrices = [name for name, shape in list(source.shapes.items())[:MOST_COMPARED] if len(shape) > 1]
    patterns = sorted({pattern(name) for name in matrices if len(name) <= LONGEST})
    close = difflib.get_close_matches((query or "")[:LONGEST], patterns, 1)
    return f"; did you mean {printable(close[0], NAME)!r}?" if close else ""
