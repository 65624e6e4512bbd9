"""The module that displays each kind of reading, imported on use, so that one kind loads no other."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from keyquery.reading import Reading
from keyquery.support.plugins import plugins

# The module of each kind's displays, with `lines`, `FIGURES`, `page` and `svg` as far as it has them.
SHOWS = {
    "ablation": "keyquery.instruments.ablation.show",
    "attribution": "keyquery.instruments.attribution.show",
    "causes": "keyquery.instruments.causes.show",
    "comparison": "keyquery.instruments.look.show.compared",
    "depth": "keyquery.instruments.depth.show",
    "dial effect": "keyquery.instruments.ablation.show_dialled",
    "discovery": "keyquery.instruments.discover.show",
    "explanation": "keyquery.instruments.causes.show_explanation",
    "flow": "keyquery.instruments.flow.show",
    "importance": "keyquery.estimators.series.show",
    "in-context explanation": "keyquery.estimators.npt.show",
    "interactions": "keyquery.estimators.events.show",
    "look": "keyquery.instruments.look.show",
    "lineage": "keyquery.instruments.lineage.show",
    "lineage search": "keyquery.instruments.lineage.show_relatives",
    "monitor": "keyquery.instruments.monitor.show",
    "npt explanation": "keyquery.estimators.npt.show",
    "ranking scores": "keyquery.instruments.rankings.show",
    "reranking": "keyquery.estimators.rerank.show",
    "roles": "keyquery.instruments.roles.show",
    "survey": "keyquery.survey.show",
    "time kernel": "keyquery.layers.time.show",
    "transport": "keyquery.instruments.transport.show",
    "wiring": "keyquery.instruments.attribution.show_wiring",
}


def show_of(reading: Reading) -> ModuleType | None:
    """The module that displays a reading; None for an unknown kind, which is shown by its records."""
    kind = reading.kind
    module = SHOWS.get(kind) or next((plugin.SHOWS[kind] for plugin in plugins() if kind in plugin.SHOWS), None)
    return None if module is None else import_module(module)
