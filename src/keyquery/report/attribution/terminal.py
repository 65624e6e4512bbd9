"""Attributions and wirings in the terminal: a sentence first, then a short table."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from keyquery.instruments.attribution.attribution import Attribution
from keyquery.instruments.attribution.wiring import Wiring
from keyquery.pages.tables import columns_table
from keyquery.report.attribution.wording import DEPTH_2, ablation_sentence, named, only_key, sentence

ROWS = 8  # of a table
PATHS, STEPS = 3, 2  # paths of depth 2, and tokens of each
HEADS = 24  # heads of a wiring that are listed


def attribution_lines(reading: Attribution) -> list[Any]:
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


def wiring_lines(reading: Wiring) -> list[Any]:
    """The heads with the clearest single source, and their largest sources on both sides."""
    rows = []
    for head in reading.heads:
        sides = [reading.of(head["name"], side) for side in ("query", "key")]
        heads = [row["share"] for side in sides for row in side if row["clear"] and _is_head(row["source"])]
        rows.append((max(heads, default=0.0), head["name"], sides))
    rows.sort(key=lambda row: -row[0])
    first = rows[0] if rows else None
    lines: list[Any] = []
    if first is not None and first[0] > 0:
        side, cell = _fed_by_head(first[2])
        null = f"against {cell['null']:.0%} with its tokens shuffled"
        lines.append(
            Text(
                f"{first[1]} reads its {side} from {cell['source']}: {first[0]:.0%} of its score variance, {null}",
                style="bold",
            )
        )
    counted = f"{reading.sequences} sequences, {reading.tokens} tokens"
    lines += [Text(f"{reading.model['name']}: shares of score variance by source, {counted}", style="dim"), ""]
    table = columns_table("head", Text("queries from"), "null", Text("keys from"), "null")
    for _, name, sides in rows[:HEADS]:
        table.add_row(name, *(cell for side in sides for cell in _listed(side)))
    lines += [
        table,
        "",
        "Sources above their null, with 95 % intervals; shares sum to 1, and may be negative. null: the share "
        "of the first with its tokens shuffled, upper end.",
    ]
    if len(rows) > HEADS:
        lines.append(f"The {HEADS} of {len(rows)} heads most fed by one head; --csv or --json for all.")
    return [*lines, *(f"Note: {note}." for note in reading.notes)]


def _is_head(source: str) -> bool:
    return source.rpartition(".")[2].isdecimal() and "." in source


def _fed_by_head(sides: list[list[dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    cells = [
        (name, row)
        for name, side in zip(("queries", "keys"), sides, strict=True)
        for row in side
        if row["clear"] and _is_head(row["source"])
    ]
    return max(cells, key=lambda cell: cell[1]["share"])


def _listed(side: list[dict[str, Any]], most: int = 3) -> tuple[Text, str]:
    """The largest sources above their null, and the null level of the first."""
    clear = [row for row in side if row["clear"]][:most]
    shares = (f"{row['source']} {row['share']:.0%} ±{(row['high'] - row['low']) / 2:.0%}" for row in clear)
    return Text(", ".join(shares) or "–"), f"{clear[0]['null']:.0%}" if clear else ""


def _number(value: float, pair: bool) -> str:
    return f"{value:+z.2f}" if pair else f"{value:.1%}"


def _raw(part: Any) -> str:
    return f"{part['contribution']:+z.2f}"
