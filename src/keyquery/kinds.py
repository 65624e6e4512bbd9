"""The one table of names: where each kind of reading is, what displays it, and who reads a saved estimator.

Nothing else in the library imports a module by a string: what is not asked for is not loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from keyquery.support.plugins import plugins


class Kind(NamedTuple):
    """The module of a kind's class, and that of its displays: `lines`, `FIGURES`, `page` and `svg`, if it has them."""

    module: str
    show: str = ""


KINDS: dict[str, Kind] = {
    "ablation": Kind("keyquery.instruments.ablation.ablate", "keyquery.instruments.ablation.show"),
    "attribution": Kind("keyquery.instruments.attribution.attribution", "keyquery.instruments.attribution.show"),
    "causes": Kind("keyquery.learn.causes.causes", "keyquery.learn.causes.show"),
    "comparison": Kind("keyquery.instruments.look.compare", "keyquery.instruments.look.show.compared"),
    "depth": Kind("keyquery.learn.depth.depth", "keyquery.learn.depth.show"),
    "dial effect": Kind("keyquery.instruments.ablation.dialled", "keyquery.instruments.ablation.show_dialled"),
    "discovery": Kind("keyquery.learn.discover.discover", "keyquery.learn.discover.show"),
    "distillation": Kind("keyquery.learn.distill"),
    "event evaluation": Kind("keyquery.learn.events.evaluation"),
    "explanation": Kind("keyquery.learn.causes.explain", "keyquery.learn.causes.show_explanation"),
    "flow": Kind("keyquery.instruments.flow.flow", "keyquery.instruments.flow.show"),
    "importance": Kind("keyquery.learn.series.importance", "keyquery.learn.series.show"),
    "in-context explanation": Kind("keyquery.learn.in_context.explanation", "keyquery.learn.npt.show"),
    "interactions": Kind("keyquery.learn.events.interactions", "keyquery.learn.events.show"),
    "lineage": Kind("keyquery.instruments.lineage.lineage", "keyquery.instruments.lineage.show"),
    "lineage search": Kind("keyquery.instruments.lineage.index", "keyquery.instruments.lineage.show_relatives"),
    "look": Kind("keyquery.instruments.look.reading", "keyquery.instruments.look.show"),
    "monitor": Kind("keyquery.instruments.monitor.reading", "keyquery.instruments.monitor.show"),
    "npt explanation": Kind("keyquery.learn.npt.explanation", "keyquery.learn.npt.show"),
    "primal": Kind("keyquery.learn.layers.primal.objective"),
    "projection": Kind("keyquery.learn.cooccurrence.cooccurrence"),
    "ranking scores": Kind("keyquery.learn.rankings.rankings", "keyquery.learn.rankings.show"),
    "reranking": Kind("keyquery.learn.rerank.reading", "keyquery.learn.rerank.show"),
    "roles": Kind("keyquery.instruments.roles.roles", "keyquery.instruments.roles.show"),
    "survey": Kind("keyquery.survey.reading", "keyquery.survey.show"),
    "time kernel": Kind("keyquery.learn.layers.time.encodings", "keyquery.learn.layers.time.show"),
    "transport": Kind("keyquery.learn.transport.transport", "keyquery.learn.transport.show"),
    "wiring": Kind("keyquery.instruments.attribution.wiring", "keyquery.instruments.attribution.show_wiring"),
}
# Files of fitted estimators say their class.
ESTIMATORS = {
    "EventModel": "keyquery.learn.events.model",
    "InContextClassifier": "keyquery.learn.in_context.classifier",
    "NPTClassifier": "keyquery.learn.npt.estimators",
    "NPTRegressor": "keyquery.learn.npt.estimators",
    "Reranker": "keyquery.learn.rerank.learned",
    "SeriesClassifier": "keyquery.learn.series.classifier",
    "VisualParser": "keyquery.learn.vision_language.parser",
}
# Layers that blocks are built from by name, and that learn in other ways than `kq.Attention`.
LAYERS = {"primal": "keyquery.learn.layers.primal:PrimalAttention"}


def kinds() -> dict[str, Kind]:
    """All kinds: the table, and what plug-ins add to it."""
    return {**KINDS, **{name: kind for plugin in plugins() for name, kind in plugin.KINDS.items()}}


def imported(path: str) -> Callable[..., Any]:
    """The function or class that "module:name" names."""
    module, name = path.split(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def show_of(reading: Any) -> ModuleType | None:
    """The module that displays a reading; None for an unknown kind, which is shown by its records."""
    name = kinds().get(reading.kind, Kind("")).show
    return import_module(name) if name else None
