"""Estimators by name: what a file that one of them has saved holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from keyquery.bounded_json import parse_json
from keyquery.estimators.datapoints import NPTClassifier, NPTRegressor
from keyquery.estimators.events import EventModel
from keyquery.estimators.rerank import Reranker
from keyquery.estimators.series import SeriesClassifier
from keyquery.estimators.vision_language import VisualParser

SAVED = (EventModel, NPTClassifier, NPTRegressor, Reranker, SeriesClassifier, VisualParser)
KINDS: dict[str, Any] = {kind.__name__: kind for kind in SAVED}


def saved_network(path: str | Path) -> nn.Module | None:
    """The network of an estimator that was saved to this file; None where the file is anything else.

    >>> saved_network("there is none") is None
    True
    """
    if Path(path).suffix != ".safetensors" or not Path(path).is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            facts = parse_json((file.metadata() or {}).get("keyquery", "null"))
    except (SafetensorError, ValueError):
        return None
    kind = KINDS.get(str(facts.get("kind"))) if isinstance(facts, dict) else None
    return None if kind is None else kind.load(path, device="cpu").network_
