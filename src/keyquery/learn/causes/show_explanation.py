"""The sets of tokens that a prediction depends on, in the terminal."""

from __future__ import annotations

from typing import Any

from keyquery.learn.causes.explain import Explanation
from keyquery.pages.tables import Text


def lines(reading: Explanation) -> list[Any]:
    """The sets of tokens, and the number of model queries."""
    return [*set_lines(reading.to_dict(), list(reading.tokens) or None)]


def set_lines(explanation: dict[str, Any], tokens: list[str] | None) -> list[Any]:
    """An explanation in a line, with the names of tokens as far as they are known."""
    names = tokens or {place: str(place) for place in (explanation["target"], *explanation["pool"])}
    queries = f"{explanation['calls']} model queries"
    target = f"{explanation['target']}:{names[explanation['target']]}"
    replaced = explanation.get("replaced")
    prediction = target + (f" (predicted; the text has {replaced})" if replaced else "")
    if not explanation["pool"]:
        return [Text(f"No token is connected to {target}: there is no set to mask.")]
    if not explanation["calls"]:
        near = " ".join(f"{place}:{names[place]}" for place in explanation["pool"]) or "none"
        return [Text(f"Connected to {target}, nearest first: {near}. The model has no LM head to test predictions.")]
    if not explanation["sets"]:
        most = explanation["largest"]
        return [Text(f"None of the tested sets of up to {most} tokens changes {prediction}; {queries}.")]
    each = "; ".join(" + ".join(f"{place}:{names[place]}" for place in nodes) for nodes in explanation["sets"])
    return [Text(f"{prediction} depends on: {each} ({queries}).", style="bold")]
