"""An attribution in one sentence, as the terminal and the page show it."""

from __future__ import annotations

import numpy as np

from keyquery.instruments.attribution.attribution import Attribution

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
