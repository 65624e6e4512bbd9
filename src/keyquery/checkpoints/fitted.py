"""Files of saved estimators: their kind and network."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from keyquery.support.bounded_json import parse_json

# By name, since estimators import this package.
KINDS = {
    "EventModel": "keyquery.estimators.events.model",
    "InContextClassifier": "keyquery.estimators.in_context.classifier",
    "NPTClassifier": "keyquery.estimators.npt.estimators",
    "NPTRegressor": "keyquery.estimators.npt.estimators",
    "Reranker": "keyquery.estimators.rerank.learned",
    "SeriesClassifier": "keyquery.estimators.series.classifier",
    "VisualParser": "keyquery.estimators.vision_language.parser",
}


def saved_network(path: Any) -> nn.Module | None:
    """The network of a saved estimator; None if the file is anything else.

    Parameters
    ----------
    path
        A file written by an estimator's `save`, or anything else.

    Returns
    -------
    Module or None
        The network.

    Examples
    --------
    >>> saved_network("there is none") is None
    True
    """
    if not isinstance(path, (str, Path)) or Path(path).suffix != ".safetensors" or not Path(path).is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            facts = parse_json((file.metadata() or {}).get("keyquery", "null"))
    except (SafetensorError, ValueError):
        return None
    kind = str(facts.get("kind")) if isinstance(facts, dict) else ""
    if kind not in KINDS:
        return None
    network: nn.Module = getattr(import_module(KINDS[kind]), kind).load(path, device="cpu").network_
    return network


def opened(source: Any, name: str | None, **options: Any) -> tuple[Any, str | None]:
    """The source to analyse and its name: the network of a saved estimator, else the source itself.

    `options` that describe other files raise for a saved estimator.
    """
    network = saved_network(source)
    if network is None:
        return source, name
    if given := [option for option, value in options.items() if value is not None]:
        raise ValueError(f"{given[0]} is not for {source}, which an estimator has saved: it is read as it is")
    return network, name or Path(source).name
