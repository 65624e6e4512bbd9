"""One look, or several side by side, as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any

from rich.console import Console, ConsoleOptions, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from keyquery.checkpoints.labels import family_of, name_of
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.compare import Comparison
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show.differences import difference_lines
from keyquery.instruments.look.show.shares import (
    BARS,
    CHANGES,
    EVIDENCE,
    OF_DATA,
    OF_WEIGHTS,
    changes_sign,
    costliest,
    crossed,
    has_data,
    leading,
    mean_shares,
    sample_of,
    window,
    with_bars,
)
from keyquery.instruments.look.show.tables import corpus_tables, has_roles, role_tables, roles_of, tokens_tables
from keyquery.pages.tables import plain_table
from keyquery.support.printable import counted

# Distinct for every kind of colour vision, in light and dark terminals, and by shape without colour.
MARKS = dict(
    zip(
        BARS,
        (("█", "blue"), ("▓", "yellow"), ("▒", "magenta"), ("▞", "green"), ("░", "white"), ("▚", "cyan")),
        strict=True,
    )
)
WIDEST, NARROWEST = 24, 8  # characters of a bar
MOST_HEADS = 160
COSTLIEST = 3  # heads whose needs are spelled out


def look_lines(reading: Look) -> list[Any]:
    """Legend, one row per head (or per layer if there are many heads), footnotes, and the labels."""
    few = len(reading.heads) <= MOST_HEADS
    table = _heads_table(reading) if few else _layers_table(reading)
    more = [*tokens_tables(reading), *corpus_tables(reading)] if few else []
    more += role_tables(reading)
    return [
        Group(*_title(reading), legend(reading), table, *_footnotes([reading], few, few), *_lengths(reading), *more),
        *_summary(reading),
    ]


def comparison_lines(reading: Comparison) -> list[Any]:
    """Differences, then bars side by side if heads and views are the same, else one look after the other."""
    looks, differences = reading.looks, [*difference_lines(reading), ""]
    alike = {(len(look.layers), len(look.heads), has_data(look)) for look in looks}
    if len(alike) > 1:
        shown = (part for look in looks for part in (*look_lines(look), ""))
        return [*shown, *differences, *map(_in_short, looks)]
    moved = bool(reading.changes) and all(change["rows"] is not None for change in reading.changes)
    if moved and not has_data(looks[0]):
        return [*differences, *map(_in_short, looks)]
    few = len(looks[0].heads) <= MOST_HEADS
    everything = list(zip(*(look.heads if few else look.layers for look in looks), strict=True))
    unequal = [rows for rows in everything if any(_values(row) != _values(rows[0]) for row in rows[1:])]
    tables = _side_by_side(looks, unequal, few) if unequal else []
    equal, noun = len(everything) - len(unequal), "heads" if few else "layers"
    same = [f"{equal} of {len(everything)} {noun} have identical values and are not shown."] if equal else []
    lengths = (part for look in looks for part in _lengths(look))
    beside = (part for look in looks if few for part in corpus_tables(look))
    return [*differences, *tables, *same, *lengths, "", *map(_in_short, looks), *beside]


def _values(row: Mapping[str, Any]) -> Any:
    return row["raw"], row.get("folded"), row.get("on_data")


def _side_by_side(looks: Sequence[Look], everything: list[Any], few: bool) -> list[Any]:
    """Bars, symmetry and labels of the same heads (or layers) of several looks."""
    view = "on_data" if has_data(looks[0]) else "raw"
    over = window(looks[0]) if len({window(look) for look in looks}) == 1 else None
    table = plain_table("head" if few else "layer")
    for look in looks:
        length = (window(look) or "").split(", ")[0]  # beside every share; how many sequences, above the table
        under = f"\n{length if over else window(look) or ''}"
        table.add_column(Text(f"{look.model['name']}{under}".rstrip()))
        table.add_column(f"symmetry\n{view.replace('_', ' ')}", justify="right", no_wrap=True)
        if few:
            table.add_column("label")
    for rows in everything:
        cells: list[Any] = [Text(name_of(looks[0].model, rows[0]["layer"], rows[0]["head"] if few else None))]
        for look, row in zip(looks, rows, strict=True):
            heads = [row] if few else [head for head in with_bars(look) if head["layer"] == row["layer"]]
            cells += [_bar_of(heads, look), _symmetry(heads, view), *([_label(row)] if few else [])]
        table.add_row(*cells)
    return [legend(looks[0], over), table, *_footnotes(looks, few)]


def legend(look: Look, over: str | None = None) -> Text:
    """What bars are shares of, the window, and the marks of the parts."""
    on_data = has_data(look)
    shown = [*PARTS, *(["pairwise"] if crossed(look) else [])] if on_data else PARTS[:2]
    parts = [Text.assemble(mark, f" {name}") for name, mark in MARKS.items() if name in shown]
    of = ", ".join(part for part in (OF_DATA if on_data else OF_WEIGHTS, over) if part)
    return Text.assemble(f"bars: {of}\n", Text("  ").join(parts))


class Bar:
    """Shares as one bar, as wide as the column allows; the remainder to 1 is blank."""

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares = shares

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(NARROWEST, WIDEST).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        wide = min(options.max_width, WIDEST)
        sums = (sum(self.shares[: i + 1]) for i in range(len(self.shares)))
        ends = list(
            accumulate((round(wide * min(max(at, 0.0), 1.0)) for at in sums), max)
        )  # negative shares count as 0
        pieces = zip([0, *ends[:-1]], ends, MARKS.values(), strict=False)
        yield Text.assemble(*((mark * (end - start), colour) for start, end, (mark, colour) in pieces))


def _title(reading: Look) -> list[Text]:
    model = reading.model
    architecture = f", architecture {family}" if (family := family_of(model)) else ""
    shown = f"{len(reading.layers)} of " if len(reading.layers) < model["layers"] else ""
    layers = f"{shown}{counted(model['layers'], 'layer')}, {counted(len(reading.heads), 'head')}"
    lines = [Text(f"{model['name']}{architecture}: {layers}, width {model['width']}", style="bold")]
    data = reading.provenance.get("data")
    return [*lines, Text(f"on {sample_of(reading)}")] if data else lines


def _heads_table(reading: Look) -> Table:
    on_data = has_data(reading)
    table = plain_table("head")
    table.add_column("parts")
    costs = any(_off(head) for head in reading.heads)
    columns = ["largest\nshare"] * on_data + ["nats:\nhead off", "nats: cost-\nliest part"] * costs
    columns += ["symmetry\nraw", "symmetry\nfolded"] + ["symmetry\non data"] * on_data
    for name in [*columns, "rank\nraw"]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("label", min_width=len("undecided~"))
    roles = has_roles(reading)
    if roles:
        table.add_column("role")
    for head in reading.heads:
        views = ("raw", "folded", "on_data") if on_data else ("raw", "folded")
        table.add_row(
            Text(name_of(reading.model, head["layer"], head["head"])),
            _bar_of([head], reading),
            *([_largest(head["on_data"])] if on_data else []),
            *([_off(head)] if costs else []),
            *([_costliest(head)] if costs else []),
            *(_symmetry([head], view) for view in views),
            f"{head['raw']['effective_rank']:.0f}",
            ", ".join([_label(head), *head.get("properties", [])]),
            *([roles_of([head])] if roles else []),
        )
    return table


def _layers_table(reading: Look) -> Table:
    table = plain_table("layer")
    table.add_column("parts, mean over heads")
    for name in ("symmetry raw\nof the layer", "column direc-\ntionality, raw", "symmetry raw\nof its heads"):
        table.add_column(name, justify="right", no_wrap=True)
    roles = has_roles(reading)
    if roles:
        table.add_column("roles of its heads")
    for layer in reading.layers:
        heads = [head for head in reading.heads if head["layer"] == layer["layer"]]
        values = sorted(head["raw"]["symmetry"] for head in heads)
        table.add_row(
            Text(name_of(reading.model, layer["layer"])),
            _bar_of([head for head in with_bars(reading) if head["layer"] == layer["layer"]], reading),
            f"{layer['raw']['symmetry']:+z.2f}",
            f"{layer['raw']['column_directionality']:+z.2f}",
            f"{values[0]:+z.2f} … {values[-1]:+z.2f}",
            *([roles_of(heads)] if roles else []),
        )
    return table


def _bar_of(heads: Sequence[Mapping[str, Any]], look: Look) -> Bar | Text:
    """The mean bar of heads; none for cross-attention in a look on data, whose bar would not be comparable."""
    shown = [head for head in heads if head["on_data"] or not has_data(look)]
    return Bar(mean_shares(shown)) if shown else Text("not on data", style="dim")


def _largest(data: Mapping[str, Any] | None) -> str:
    if data is None:
        return "–"
    _, share, half = leading(data)
    return f"{100 * share:.0f} %" if half is None else f"{100 * share:.0f} ±{100 * half:.0f} %"


def _off(head: Mapping[str, Any]) -> str:
    """What it costs to switch a head off, if that is known."""
    cost = head.get("ablation", {}).get("zero")
    return "" if cost is None else f"{cost[0]:.3f}"


def _costliest(head: Mapping[str, Any]) -> Text:
    """The part whose absence costs most, by its mark, and its cost."""
    part = costliest(head.get("ablation", {}))
    return Text() if part is None else Text.assemble(MARKS[part[0]], f" {part[1]:.3f}")


def _symmetry(heads: Sequence[Mapping[str, Any]], view: str) -> str:
    """The mean symmetry of heads in a view, with a mark if its sign depends on the window."""
    values = [head[view]["symmetry"] for head in heads if "symmetry" in (head[view] or {})]
    if not values:
        return "–"
    mark = CHANGES if view == "on_data" and any(map(changes_sign, heads)) else ""
    return f"{sum(values) / len(values):+z.2f}{mark}"


def _label(head: Mapping[str, Any]) -> str:
    return head["label"] + EVIDENCE.get(head.get("evidence", ""), "")


def _footnotes(looks: Sequence[Look], labels: bool, shares: bool = False) -> list[str]:
    """Explanations of the marks that occur in a table, which may have the columns `labels` and largest `shares`."""
    heads, notes = [head for look in looks for head in look.heads], []
    data = [head["on_data"] for head in heads if head["on_data"]]
    evidence = {head.get("evidence") for head in heads} if labels else set()
    if "estimated" in evidence:
        notes.append("~ label from estimated costs")
    if "weights" in evidence:
        notes.append("° label from the weights only")
    if any(map(changes_sign, heads)):
        notes.append(f"{CHANGES} sign differs in the first half of each window")
    if shares and any(metrics.get("intervals") for metrics in data):
        notes.append("± half-width of the 95 % interval over sequences")
    if data:
        low, high = (end(metrics["interaction"] for metrics in data) for end in (min, max))
        between = f"2·covariances between parts, here {100 * low:+z.0f} to {100 * high:+z.0f} %"
        notes.append(f"parts and interaction ({between}) sum to 100 %")
    return ["", *(f"{note}." for note in notes)] if notes else []


def _lengths(reading: Look) -> list[Any]:
    """Mean shares over heads per window length, if several were measured."""
    heads = [head for head in reading.heads if head.get("lengths") and head["on_data"]]
    data = reading.provenance.get("data")
    if not heads or not data:
        return []
    own = data.get("longest", data["length"])
    rows: dict[int, list[Mapping[str, Any]]] = {own: [head["on_data"] for head in heads]}
    for head in heads:
        for row in head["lengths"]:
            rows.setdefault(row["length"], []).append(row) if row["length"] != own else None
    table = plain_table("window")
    for name in (*PARTS, "interaction", "symmetry\non data"):
        table.add_column(name, justify="right", no_wrap=True)
    for length, values in sorted(rows.items()):
        mean = {name: sum(row[name] for row in values) / len(values) for name in (*PARTS, "interaction", "symmetry")}
        shares = (f"{100 * mean[name]:z.0f} %" for name in (*PARTS, "interaction"))
        table.add_row(f"{length:,}", *shares, f"{mean['symmetry']:+z.2f}")
    title = f"{reading.model['name']}: shares by window length in tokens, mean over heads"
    return [Text(""), Text(title, style="bold"), table]


def _summary(reading: Look) -> list[str]:
    symmetry = median(layer["raw"]["symmetry"] for layer in reading.layers)
    direction = median(layer["raw"]["column_directionality"] for layer in reading.layers)
    together = f"symmetry {symmetry:+z.2f}, column directionality {direction:+z.2f}"
    lines = [f"\nAll heads of a layer together, raw, median over layers: {together}."]
    if not has_data(reading):
        lines.append(f"Random weights have symmetry 1/width = {1 / reading.model['width']:.3f}.")
        on_data = (
            "" if reading.model.get("family") == "custom" else " For shares of score variance on data: --text FILE."
        )
        lines.append(f"Weights alone decide few labels.{on_data}")
    lines += [f"Labels: {_counts(reading)}.", *_needs(reading)]
    if len(reading.heads) > MOST_HEADS:
        lines.append("For single heads: --layers to select some, --csv or --json for all.")
    notes = sorted({note for layer in reading.layers for note in layer.get("notes", [])})
    notes += [
        reading.provenance[of]["note"] for of in ("data", "costs") if (reading.provenance.get(of) or {}).get("note")
    ]
    return lines + [f"Note: {note}." for note in notes]


def _needs(reading: Look) -> list[str]:
    """What labels by costs rest on, and what the costliest heads need."""
    costs = reading.provenance.get("costs") or {}
    if "threshold" not in costs:
        return []
    limit = f"{costs['threshold']} {costs['unit']} on {costs['sequences']} sequences"
    known = [head for head in reading.heads if _off(head)]
    first = sorted(known, key=lambda head: -head["ablation"]["zero"][0])[:COSTLIEST]
    return [
        f"A head needs the smallest set of parts that costs at most {limit}; undecided: the interval contains it.",
        *(f"  {name_of(reading.model, head['layer'], head['head'])} {head['reason']}." for head in first),
    ]


def _counts(reading: Look) -> str:
    return ", ".join(f"{count} {label}" for label, count in reading.summary.items())


def _in_short(look: Look) -> str:
    """One line: labels, mean shares, and symmetry of the weights."""
    shares = zip(BARS, mean_shares(with_bars(look)), strict=False)
    listed = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share >= 0.005)
    middle = median(row["raw"]["symmetry"] for row in look.layers)
    of = f"mean shares, {window(look)}" if has_data(look) else OF_WEIGHTS
    return f"{look.model['name']}: {_counts(look)} ({of}: {listed}; raw symmetry of layers, median: {middle:+z.2f})."
