"""Files of saved estimators: their kind and network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from keyquery.kinds import ESTIMATORS, imported
from keyquery.support.bounded_json import parse_json


def saved_network(path: Any) -> nn.Module | None:
    """The network of a saved estimator; None if the file is anything else."""
    if not isinstance(path, (str, Path)) or Path(path).suffix != ".safetensors" or not Path(path).is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            facts = parse_json((file.metadata() or {}).get("keyquery", "null"))
    except (SafetensorError, ValueError):
        return None
    kind = str(facts.get("kind")) if isinstance(facts, dict) else ""
    if kind not in ESTIMATORS:
        return None
    estimator: Any = imported(f"{ESTIMATORS[kind]}:{kind}")
    network: nn.Module = estimator.load(path, device="cpu").network_
    return network


def opened(source: Any, name: str | None, options: Mapping[str, Any]) -> tuple[Any, str | None]:
    """The source to analyse and its name: the network of a saved estimator, which takes no `options`, else itself."""
    network = saved_network(source)
    if network is None:
        return source, name
    if given := [option for option, value in options.items() if value not in (None, False)]:
        raise ValueError(f"{given[0]} is not for {source}, which an estimator has saved: it is read as it is")
    return network, name or Path(source).name
