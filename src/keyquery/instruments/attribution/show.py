"""Attributions in the terminal, as a figure and as a page: a sentence first, then the largest sources."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyquery.instruments.attribution.attribution import SIDES, Attribution
from keyquery.pages.components import DIGITS, column, measure, versioned
from keyquery.pages.document import document
from keyquery.pages.figures import signed_map
from keyquery.pages.tables import Text, columns_table
from keyquery.reading import short

ROWS, PATHS = 8, 3  # of a table, and of depth 2 in the terminal
SHOWN = 12  # sources on each side of a figure, and of the page
PLURAL = {"query": "queries", "key": "keys"}
DEPTH_2 = (
    "Depth 2: the heads of largest relative score, by the tokens from which they moved most. Contributions are raw, "
    "not relative to other keys."
)


def named(reading: Attribution, position: int | None) -> str:
    """A token by its position and text."""
    return "" if position is None else f"{position} {reading.tokens[position]!r}"


def sentence(reading: Attribution) -> str:
    """Which head attends where, and because of which sources."""
    pair = f"from {named(reading, reading.query)} to {named(reading, reading.key)}"
    if only_key(reading):
        return f"{reading.head} attends {pair} because it sees no other key: every source is relative 0"
    key, value = next(iter(reading.by_source("key").items()))
    if reading.query is None:
        query, share = next(iter(reading.by_source("query").items()))
        return (
            f"{reading.head} scores {len(reading.tokens)} tokens mostly by {key} in its keys ({value:.0%} of the "
            f"variance) and {query} in its queries ({share:.0%})"
        )
    relative = sum(map(sum, reading.table["relative"]))
    paths = [path for path in reading.paths if path["side"] == "key" and path["source"] == key and path["steps"]]
    moved = f", which read most from {named(reading, paths[0]['steps'][0]['position'])}" if paths else ""
    source, pair = f"{key} in the key{moved}", f"{pair} (attention {reading.weight:.0%})"
    if relative > 0 and value > 0:
        verb = "attends" if reading.weight is None or reading.weight >= 0.01 else "hardly attends"
        return f"{reading.head} {verb} {pair} because of {source}: {value:+z.2f} of {relative:+z.2f} above the mean key"
    standing = f"{abs(relative):.2f} {'above' if relative > 0 else 'below'} the mean key"
    return f"{reading.head} scores {pair} {standing}; the largest source is {source}: {value:+z.2f}"


def only_key(reading: Attribution) -> bool:
    """Whether the query sees one key alone, so that nothing is relative to others."""
    return reading.query is not None and reading.weight == 1 and not np.any(reading.table["relative"])


def sentences(reading: Attribution) -> list[str]:
    """Why the head attends there, and what is left of the attention without one source, if one was taken out."""
    if reading.ablated is None:
        return [f"{sentence(reading)}."]
    rows, of = reading.ablated["pairs"], f"{reading.ablated['source']} in its {PLURAL[reading.ablated['side']]}"
    before, after, random = (sum(row[name] for row in rows) / len(rows) for name in ("weight", "without", "random"))
    which = "the attention" if reading.query is not None else f"the mean attention of its {len(rows)} largest pairs"
    control = f"without a random write of its size, to {random:.0%}"
    return [f"{sentence(reading)}.", f"Without {of}, {which} goes from {before:.0%} to {after:.0%}; {control}."]


def lines(reading: Attribution) -> list[Any]:
    """Why the head attends there, the largest sources of both sides, and paths at depth 2."""
    lines: list[Any] = [Text(text.removesuffix("."), style="bold") for text in sentences(reading)]
    notes = [f"Note: {note}." for note in reading.notes]
    if only_key(reading):
        return [*lines, *notes]
    pair, view = reading.query is not None, main_view(reading)
    table = columns_table("query side", view, "null", Text("key side"), view, "null")
    for rows in zip(*(_largest(reading, side, view)[:ROWS] for side in SIDES), strict=True):
        cells: list[Any] = []
        for source, value, null in rows:
            level = "" if null is None else f"{null:.2f}" if pair else f"{null:.1%}"
            cells += [Text(source), f"{value:+z.2f}" if pair else f"{value:.1%}", level]
        table.add_row(*cells)
    meaning = "relative: to the mean over the visible keys" if pair else "share: of the score variance"
    lines += ["", table, Text(f"{meaning}; null: its magnitude with the source's tokens shuffled, 95 %", style="dim")]
    lines += ["", DEPTH_2] if reading.paths else []
    for first, *steps in _paths(reading)[:PATHS]:
        lines += [Text(first), *(Text(f"  {step}") for step in steps)]
    lines += [] if pair else ["", "Pairs with the largest scores:"]
    for row in [] if pair else reading.pairs:
        tokens, source = (named(reading, row[side]) for side in SIDES), f"most from {row['key_source']}"
        facts = f"{row['relative']:+z.2f}, attention {row['weight']:.0%}, {source} ({row['from_source']:+z.2f})"
        lines.append(Text(f"  {' → '.join(tokens)}: {facts}"))
    return [*lines, *notes]


def main_view(reading: Attribution) -> str:
    """The view that is shown first, which has null levels."""
    return "relative" if reading.query is not None else "share"


def _largest(reading: Attribution, side: str, view: str) -> list[tuple[str, float, float | None]]:
    """The largest sources of a side, and their null levels where there are any."""
    nulls = reading.null.get(side, ()) if view == main_view(reading) else ()
    levels = dict(zip(reading.sources, nulls, strict=False))
    sums = list(reading.by_source(side, view).items())[:SHOWN]
    return [(source, value, levels.get(source)) for source, value in sums]


def _paths(reading: Attribution) -> list[list[str]]:
    """What heads moved, and from where: a line per head, its steps, and the rest."""
    texts = []
    for path in reading.paths:
        token = named(reading, getattr(reading, path["side"]))
        value = f"{path['contribution']:+z.2f} (relative {path['relative']:+z.2f})"
        steps = []
        for step in path["steps"]:
            origins = ", ".join(f"{row['source']} {row['contribution']:+z.2f}" for row in step["origins"])
            where = f"from {named(reading, step['position'])}, attention {step['weight']:.0%}"
            steps.append(f"{where}: {step['contribution']:+z.2f} ({origins}, rest {step['rest']:+z.2f})")
        wrote = f"{path['source']} wrote into the {path['side']} {token}: {value}"
        texts.append([wrote, *steps, f"rest {path['rest']:+z.2f}"])
    return texts


def attribution_map(reading: Attribution, pyplot: Any, view: str | None = None) -> Any:
    """The largest sources of both sides: query-side rows by key-side columns."""
    view = view or main_view(reading)
    rows, columns = ([source for source, _, _ in _largest(reading, side, view)] for side in SIDES)
    chosen = ([reading.sources.index(source) for source in side] for side in (rows, columns))
    values = np.asarray(reading.table[view])[np.ix_(*chosen)]
    figure, axis = pyplot.subplots(figsize=(1.6 + 0.3 * len(columns), 1.5 + 0.24 * len(rows)), layout="constrained")
    label = f"{view} score" if reading.query is not None else "share of the score variance"
    signed_map(axis, values, shrink=0.8, label=label)
    axis.set_xticks(range(len(columns)), columns, rotation=60, ha="right")
    axis.set_yticks(range(len(rows)), rows)
    axis.set(xlabel="key side", ylabel="query side")
    where = "all pairs" if reading.query is None else f"{reading.query} → {reading.key}"
    figure.suptitle(f"{reading.model['name']}, head {reading.head}: {where}", weight="bold")
    return figure


FIGURES = {"map": attribution_map}


def page(reading: Attribution) -> str:
    """Why the head attends there in a sentence, its sources on both sides, their table, paths and pairs."""
    marks = {} if reading.query is None else {reading.query: "query", reading.key: "key-token"}
    texts = [{"tokens": list(reading.tokens), "marks": marks}]
    note = "orange: query; blue: key" if marks else ""
    before: list[dict[str, Any]] = [
        {"type": "summary", "sentences": sentences(reading)},
        {"type": "strip", "title": "Text", "note": note, "texts": texts},
    ]
    after = [_pair_table(reading)] if reading.pairs else []
    if paths := ["; ".join(path) for path in _paths(reading)]:
        after.insert(0, {"type": "list", "title": "What heads moved here", "note": DEPTH_2, "items": paths})
    tabs = []
    for view in sorted(reading.table, key=lambda view: view != main_view(reading)):
        frame, strongest = _frame(reading, view)
        bars = [_side_bars(reading, side, view) for side in ("key", "query")]
        map_ = {"type": "map", "title": "Sources: query side (rows) by key side (columns)", "written": True}
        blocks = [*before, *bars, map_, *after]
        tabs.append({"name": view.replace("_", " "), "frame": frame, "state": {"at": strongest}, "blocks": blocks})
    name = f"{reading.model['name']}, head {reading.head}"
    facts = f"{len(reading.tokens)} tokens · norms frozen at their recorded values"
    return document(name, "attribution", tabs, facts, versioned(reading.notes, reading.provenance))


def _form(view: str) -> str:
    return "percent" if view == "share" else "signed"


def _side_bars(reading: Attribution, side: str, view: str) -> dict[str, Any]:
    largest = _largest(reading, side, view)
    note = f"{view.replace('_', ' ')}, summed over the other side"
    note += "; tick: null level" if any(null is not None for _, _, null in largest) else ""
    return {
        "type": "bars",
        "place": "half",
        "title": f"{side.capitalize()} side",
        "note": note,
        "names": [source for source, _, _ in largest],
        "tones": ["var(--symmetric)" if value > 0 else "var(--skew)" for _, value, _ in largest],
        "rows": short([[value, None, None, null] for _, value, null in largest], DIGITS),
        "form": _form(view),
    }


def _frame(reading: Attribution, view: str) -> tuple[dict[str, Any], str]:
    """The largest sources of both sides with all others summed, so that the table still adds up; and its top entry."""
    table, names = np.asarray(reading.table[view]), []
    for axis, side in enumerate(SIDES):
        largest = [source for source, _, _ in _largest(reading, side, view)]
        rest = [index for index, source in enumerate(reading.sources) if source not in largest]
        parts = [table.take([reading.sources.index(source) for source in largest], axis)]
        parts += [table.take(rest, axis).sum(axis, keepdims=True)] if rest else []
        table = np.concatenate(parts, axis)
        names.append([*largest, *([f"{len(rest)} others"] if rest else [])])
    row, across = divmod(int(np.abs(table).argmax()), table.shape[1])
    unit = Attribution.units.get(view, "")
    values = measure(view, view.replace("_", " "), table.ravel().tolist(), unit=unit, form=_form(view))
    axes = {"rows": names[0], "columns": names[1], "nouns": ["query side", "key side"], "join": " × "}
    return {**axes, "measures": [values]}, f"{names[0][row]} × {names[1][across]}"


def _pair_table(reading: Attribution) -> dict[str, Any]:
    pairs = reading.pairs
    columns = [
        *(column(side, [named(reading, pair[side]) for pair in pairs]) for side in SIDES),
        column("above the mean key", [pair["relative"] for pair in pairs], form="signed"),
        column("attention", [pair["weight"] for pair in pairs], form="percent"),
        column("most from", [f"{pair['key_source']} ({pair['from_source']:+z.2f})" for pair in pairs]),
    ]
    return {"type": "table", "title": "Pairs of this text with the largest scores", "columns": columns}
