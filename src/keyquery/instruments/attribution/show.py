"""Attributions in the terminal, as a figure and as a page: a sentence first, then the largest sources."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyquery.instruments.attribution.attribution import SIDES, Attribution
from keyquery.pages.colours import LIGHT
from keyquery.pages.components import DIGITS, column, measure, versioned
from keyquery.pages.document import document
from keyquery.pages.tables import Text, columns_table
from keyquery.reading import short
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional

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
    if only_key(reading):
        pair = f"{named(reading, reading.query)} to {named(reading, reading.key)}"
        return f"{reading.head} attends from {pair} because it sees no other key: every source is relative 0"
    query = next(iter(reading.by_source("query").items()))
    key = next(iter(reading.by_source("key").items()))
    if reading.query is None:
        return (
            f"{reading.head} scores {len(reading.tokens)} tokens mostly by {key[0]} in its keys ({key[1]:.0%} of the "
            f"variance) and {query[0]} in its queries ({query[1]:.0%})"
        )
    relative = sum(map(sum, reading.table["relative"]))
    step = _moved(reading, key[0])
    source = f"{key[0]} in the key" + (f", which read most from {step}" if step else "")
    pair = f"from {named(reading, reading.query)} to {named(reading, reading.key)} (attention {reading.weight:.0%})"
    if relative > 0 and key[1] > 0:
        verb = "attends" if reading.weight is None or reading.weight >= 0.01 else "hardly attends"
        return (
            f"{reading.head} {verb} {pair} because of {source}: {key[1]:+z.2f} of {relative:+z.2f} above the mean key"
        )
    standing = "above" if relative > 0 else "below"
    return (
        f"{reading.head} scores {pair} {abs(relative):.2f} {standing} the mean key; the largest source is {source}: "
        f"{key[1]:+z.2f}"
    )


def only_key(reading: Attribution) -> bool:
    """Whether the query sees one key alone, so that nothing is relative to others."""
    return reading.query is not None and reading.weight == 1 and not np.any(reading.table["relative"])


def ablation_sentence(reading: Attribution) -> str:
    """What is left of the attention without one source; empty if none was taken out."""
    if reading.ablated is None:
        return ""
    rows, of = reading.ablated["pairs"], f"{reading.ablated['source']} in its {PLURAL[reading.ablated['side']]}"
    before, after, random = (sum(row[name] for row in rows) / len(rows) for name in ("weight", "without", "random"))
    which = "the attention" if reading.query is not None else f"the mean attention of its {len(rows)} largest pairs"
    control = f"without a random write of its size, to {random:.0%}"
    return f"Without {of}, {which} goes from {before:.0%} to {after:.0%}; {control}"


def _moved(reading: Attribution, source: str) -> str:
    """The token that a head moved into the key, at depth 2."""
    paths = [path for path in reading.paths if path["side"] == "key" and path["source"] == source and path["steps"]]
    return named(reading, paths[0]["steps"][0]["position"]) if paths else ""


ROWS = 8  # of a table
PATHS, STEPS = 3, 2  # paths of depth 2, and tokens of each


def lines(reading: Attribution) -> list[Any]:
    """Why the head attends there, the largest sources of both sides, and paths at depth 2."""
    pair = reading.query is not None
    lines: list[Any] = [Text(sentence(reading), style="bold"), ""]
    if only_key(reading):
        return [lines[0], *(f"Note: {note}." for note in reading.notes)]
    lines += [Text(f"{ablated}.", style="bold"), ""] if (ablated := ablation_sentence(reading)) else []
    unit = "relative" if pair else "share"
    table = columns_table("query side", unit, "null", Text("key side"), unit, "null")
    sides = [list(reading.by_source(side).items())[:ROWS] for side in ("query", "key")]
    for rows in zip(*sides, strict=True):
        pairs = [(Text(source), _number(value, pair)) for source, value in rows]
        nulls = [_null(reading, side, source) for side, (source, _) in zip(("query", "key"), rows, strict=True)]
        table.add_row(*pairs[0], nulls[0], *pairs[1], nulls[1])
    meaning = "relative: to the mean over the visible keys" if pair else "share: of the score variance"
    lines += [table, Text(f"{meaning}; null: its magnitude with the source's tokens shuffled, 95 %", style="dim"), ""]
    largest = reading.records()[:ROWS]
    entries = columns_table("largest entries", *(["relative", "symmetric", "skew", "raw"] if pair else ["share"]))
    for row in largest:
        cells = [row[name] for name in (("relative", "symmetric", "skew", "raw") if pair else ("share",))]
        entries.add_row(f"{row['query_source']} × {row['key_source']}", *(_number(value, pair) for value in cells))
    lines += [entries]
    lines += ["", *_paths(reading)] if reading.paths else []
    if not pair:
        lines += ["", "Pairs with the largest scores:", *_pairs(reading)]
    return [*lines, *(f"Note: {note}." for note in reading.notes)]


def _null(reading: Attribution, side: str, source: str) -> str:
    if side not in reading.null:
        return ""
    level = reading.null[side][reading.sources.index(source)]
    return f"{level:.2f}" if reading.query is not None else f"{level:.1%}"


def _paths(reading: Attribution) -> list[Any]:
    lines: list[Any] = [DEPTH_2]
    for path in reading.paths[:PATHS]:
        token = reading.query if path["side"] == "query" else reading.key
        value = f"{_raw(path)} (relative {path['relative']:+z.2f})"
        lines.append(Text(f"{path['source']} wrote into the {path['side']} {named(reading, token)}: {value}"))
        for step in path["steps"][:STEPS]:
            origins = ", ".join(f"{each['source']} {each['contribution']:+z.2f}" for each in step["origins"])
            where = f"from {named(reading, step['position'])}, attention {step['weight']:.0%}: {_raw(step)}"
            lines.append(Text(f"  {where} ({origins}, rest {step['rest']:+z.2f})"))
        rest = path["contribution"] - sum(step["contribution"] for step in path["steps"][:STEPS])
        lines.append(Text(f"  rest {rest:+z.2f}", style="dim"))
    return lines


def _pairs(reading: Attribution) -> list[Any]:
    return [
        Text(
            f"  {named(reading, pair['query'])} → {named(reading, pair['key'])}: {pair['relative']:+z.2f}, attention "
            f"{pair['weight']:.0%}, most from {pair['key_source']} ({pair['from_source']:+z.2f})"
        )
        for pair in reading.pairs
    ]


def _number(value: float, pair: bool) -> str:
    return f"{value:+z.2f}" if pair else f"{value:.1%}"


def _raw(part: Any) -> str:
    return f"{part['contribution']:+z.2f}"


SHOWN = 12  # sources on each side


def attribution_map(reading: Attribution, pyplot: Any, view: str | None = None) -> Any:
    """The largest sources of both sides: query-side rows by key-side columns."""
    view = view or ("relative" if reading.query is not None else "share")
    check_choice("view", view, tuple(reading.table))
    rows, columns = (list(reading.by_source(side, view))[:SHOWN] for side in SIDES)
    place = {source: index for index, source in enumerate(reading.sources)}
    values = np.asarray(reading.table[view])[np.ix_([place[s] for s in rows], [place[s] for s in columns])]
    figure, axis = pyplot.subplots(figsize=(1.6 + 0.3 * len(columns), 1.5 + 0.24 * len(rows)), layout="constrained")
    source_map(figure, axis, values, f"{view} score" if reading.query is not None else "share of the score variance")
    axis.set_xticks(range(len(columns)), columns, rotation=60, ha="right")
    axis.set_yticks(range(len(rows)), rows)
    axis.set(xlabel="key side", ylabel="query side")
    where = "all pairs" if reading.query is None else f"{reading.query} → {reading.key}"
    figure.suptitle(f"{reading.model['name']}, head {reading.head}: {where}", weight="bold")
    return figure


def source_map(figure: Any, axis: Any, values: np.ndarray, label: str) -> None:
    """Draw values on a scale of two colours around 0."""
    steps = [LIGHT["skew"], "#f6f8fa", LIGHT["symmetric"]]
    colours = optional("matplotlib.colors", "plot").LinearSegmentedColormap.from_list("shares", steps)
    most = float(np.abs(values).max()) or 1.0
    image = axis.imshow(values, vmin=-most, vmax=most, cmap=colours, aspect="auto", interpolation="nearest")
    bar = figure.colorbar(image, ax=axis, shrink=0.8, ticks=[-most, 0, most], label=label)
    bar.ax.set_yticklabels([f"−{most:.2g}", "0", f"+{most:.2g}"])


FIGURES = {"map": attribution_map}


def page(reading: Attribution) -> str:
    """Why the head attends there in a sentence, its sources on both sides, their table, paths and pairs."""
    common: list[dict[str, Any]] = [
        {
            "type": "summary",
            "sentences": [f"{text}." for text in (sentence(reading), ablation_sentence(reading)) if text],
        },
        _strip(reading),
    ]
    after = [_path_list(reading)] if reading.paths else []
    after += [_pair_table(reading)] if reading.pairs else []
    tabs = []
    for view in sorted(reading.table, key=lambda view: view != "relative"):
        bars = [_side_bars(reading, side, view) for side in ("key", "query")]
        frame, top = _largest(reading, view)
        units = {"type": "map", "title": "Sources: query side (rows) by key side (columns)", "written": True}
        tabs.append(
            {
                "name": view.replace("_", " "),
                "frame": frame,
                "state": {"at": top},
                "blocks": [*common, *bars, units, *after],
            }
        )
    name, facts = (
        f"{reading.model['name']}, head {reading.head}",
        f"{len(reading.tokens)} tokens · norms frozen at their recorded values",
    )
    return document(name, "attribution", tabs, facts, versioned(reading.notes, reading.provenance))


def _strip(reading: Attribution) -> dict[str, Any]:
    marks = {
        position: mark
        for position, mark in ((reading.query, "query"), (reading.key, "key-token"))
        if position is not None
    }
    texts = [{"tokens": list(reading.tokens), "marks": marks}]
    return {"type": "strip", "title": "Text", "note": "orange: query; blue: key" if marks else "", "texts": texts}


def _form(view: str) -> str:
    return "percent" if view == "share" else "signed"


def _side_bars(reading: Attribution, side: str, view: str) -> dict[str, Any]:
    """The largest sources of one side, with their null levels where there are any."""
    sums = list(reading.by_source(side, view).items())[:SHOWN]
    nulls = reading.null.get(side) if view in ("relative", "share") else None
    level = {source: nulls[index] for index, source in enumerate(reading.sources)} if nulls else {}
    note = f"{view.replace('_', ' ')}, summed over the other side" + ("; tick: null level" if nulls else "")
    return {
        "type": "bars",
        "place": "half",
        "title": f"{side.capitalize()} side",
        "note": note,
        "names": [source for source, _ in sums],
        "tones": ["var(--symmetric)" if value > 0 else "var(--skew)" for _, value in sums],
        "rows": short([[value, None, None, level.get(source)] for source, value in sums], DIGITS),
        "form": _form(view),
    }


def _largest(reading: Attribution, view: str) -> tuple[dict[str, Any], str]:
    """The largest sources of both sides with all others summed, so that the table still adds up; and its top entry."""
    table = np.asarray(reading.table[view])
    chosen = [[reading.sources.index(s) for s in list(reading.by_source(side, view))[:SHOWN]] for side in SIDES]
    names = [[reading.sources[index] for index in side] for side in chosen]
    if len(reading.sources) > SHOWN:
        rest = [[index for index in range(len(table)) if index not in side] for side in chosen]
        table = np.vstack((table[chosen[0]], table[rest[0]].sum(0)))
        table = np.hstack((table[:, chosen[1]], table[:, rest[1]].sum(1, keepdims=True)))
        names = [[*side, f"{len(others)} others"] for side, others in zip(names, rest, strict=True)]
    else:
        table = table[np.ix_(*chosen)]
    row, across = divmod(int(np.abs(table).argmax()), table.shape[1])
    unit = Attribution.units.get(view, "")
    values = measure(view, view.replace("_", " "), table.ravel().tolist(), unit=unit, form=_form(view))
    frame = {
        "rows": names[0],
        "columns": names[1],
        "nouns": ["query side", "key side"],
        "join": " × ",
        "measures": [values],
    }
    return frame, f"{names[0][row]} × {names[1][across]}"


def _path_list(reading: Attribution) -> dict[str, Any]:
    items = []
    for path in reading.paths:
        token = reading.query if path["side"] == "query" else reading.key
        value = f"{_raw(path)} (relative {path['relative']:+z.2f})"
        steps = [
            f"from {named(reading, step['position'])}, attention {step['weight']:.0%}: {_raw(step)} ("
            + ", ".join(f"{one['source']} {one['contribution']:+z.2f}" for one in step["origins"])
            + f", rest {step['rest']:+z.2f})"
            for step in path["steps"]
        ]
        where = f"{path['source']} wrote into the {path['side']} {named(reading, token)}: {value}"
        items.append("; ".join([where, *steps, f"rest {path['rest']:+z.2f}"]))
    return {"type": "list", "title": "What heads moved here", "note": DEPTH_2, "items": items}


def _pair_table(reading: Attribution) -> dict[str, Any]:
    pairs = reading.pairs
    columns = [
        column("query", [named(reading, pair["query"]) for pair in pairs]),
        column("key", [named(reading, pair["key"]) for pair in pairs]),
        column("above the mean key", [pair["relative"] for pair in pairs], form="signed"),
        column("attention", [pair["weight"] for pair in pairs], form="percent"),
        column("most from", [f"{pair['key_source']} ({pair['from_source']:+z.2f})" for pair in pairs]),
    ]
    return {"type": "table", "title": "Pairs of this text with the largest scores", "columns": columns}
