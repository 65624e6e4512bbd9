"""The sets of tokens that a prediction depends on, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyquery.learn.causes.explain import Explanation
from keyquery.pages.tables import Text


def lines(reading: Explanation) -> list[Any]:
    """The sets of tokens, and the number of model queries."""
    tokens = dict(enumerate(reading.tokens)) or {node: str(node) for node in (reading.target, *reading.pool)}
    return [Text(explained(reading.to_dict(), tokens))]


def explained(explanation: Mapping[str, Any], names: Mapping[int, str]) -> str:
    """An explanation as a sentence; tokens are named with their positions."""

    def word(node: int) -> str:
        return f"{node}:{names[node]}"

    target, replaced = word(explanation["target"]), explanation.get("replaced")
    if not explanation["pool"]:
        return f"No token is connected to {target}: there is no set to mask."
    if not explanation["calls"]:
        nearest = " ".join(map(word, explanation["pool"]))
        return f"Connected to {target}, nearest first: {nearest}. The model has no LM head to test predictions."
    prediction = target + (f" (predicted; the text has {replaced})" if replaced else "")
    queries = f"{explanation['calls']} model queries"
    if not explanation["sets"]:
        return f"None of the tested sets of up to {explanation['largest']} tokens changes {prediction}; {queries}."
    sets = "; ".join(" + ".join(map(word, nodes)) for nodes in explanation["sets"])
    return f"{prediction} depends on: {sets} ({queries})."
