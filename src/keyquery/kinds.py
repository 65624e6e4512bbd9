"""The one table of names: where each kind of reading is, how it is displayed, and who reads a saved estimator.

Nothing else in the library imports a module by a string: what is not asked for is not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from keyquery.support.plugins import plugins


class Kind(NamedTuple):
    """The module of a kind's class, and the functions that display it, each as "module:function"."""

    module: str
    terminal: str = ""
    figures: Mapping[str, str] = MappingProxyType({})
    page: str = ""
    svg: str = ""


KINDS: dict[str, Kind] = {
    "ablation": Kind(
        "keyquery.instruments.ablation.ablate",
        terminal="keyquery.report.ablation.terminal:ablation_lines",
        figures={"map": "keyquery.report.ablation.figure:ablation_map"},
    ),
    "attribution": Kind(
        "keyquery.instruments.attribution.attribution",
        terminal="keyquery.report.attribution.terminal:attribution_lines",
        figures={"map": "keyquery.report.attribution.figure:attribution_map"},
        page="keyquery.report.attribution.page:attribution_page",
    ),
    "causes": Kind(
        "keyquery.instruments.causes.causes",
        terminal="keyquery.report.causes.terminal:causes_lines",
        figures={"graphs": "keyquery.report.causes.figure:graph_figure"},
        page="keyquery.report.causes.page:graph_page",
        svg="keyquery.report.causes.svg:svg",
    ),
    "comparison": Kind(
        "keyquery.instruments.look.compare",
        terminal="keyquery.report.look.terminal:comparison_lines",
        figures={
            "auto": "keyquery.report.look.figure:default_figure",
            "triangle": "keyquery.report.look.figure:triangle_figure",
            "map": "keyquery.report.look.figure:symmetry_map",
        },
        page="keyquery.report.look.page:look_page",
        svg="keyquery.report.look.figure:triangle_svg",
    ),
    "depth": Kind(
        "keyquery.instruments.depth.depth",
        terminal="keyquery.report.depth.terminal:depth_lines",
        figures={"plane": "keyquery.report.depth.figure:plane"},
    ),
    "dial effect": Kind(
        "keyquery.instruments.ablation.dialled",
        terminal="keyquery.report.ablation.terminal:dial_effect_lines",
    ),
    "discovery": Kind(
        "keyquery.instruments.discover.discover",
        terminal="keyquery.report.discover.terminal:discovery_lines",
        figures={"graph": "keyquery.report.discover.figure:graph_figure"},
        page="keyquery.report.discover.page:discovery_page",
        svg="keyquery.report.discover.figure:svg",
    ),
    "distillation": Kind("keyquery.intervene.distill"),
    "event evaluation": Kind("keyquery.estimators.events.evaluation"),
    "explanation": Kind(
        "keyquery.instruments.causes.explain",
        terminal="keyquery.report.causes.terminal:explanation_lines",
    ),
    "flow": Kind(
        "keyquery.instruments.flow.flow",
        terminal="keyquery.report.flow.terminal:flow_lines",
        figures={"map": "keyquery.report.flow.figure:flow_map"},
        page="keyquery.report.flow.page:flow_page",
    ),
    "importance": Kind(
        "keyquery.estimators.series.importance",
        figures={"stretches": "keyquery.report.series.figure:stretches"},
    ),
    "in-context explanation": Kind(
        "keyquery.estimators.in_context.explanation",
        figures={"explanation": "keyquery.report.npt.figure:explanation"},
    ),
    "interactions": Kind(
        "keyquery.estimators.events.interactions",
        figures={"interactions": "keyquery.report.events.figure:interactions"},
    ),
    "lineage": Kind(
        "keyquery.instruments.lineage.lineage",
        terminal="keyquery.report.lineage.terminal:lineage_lines",
        page="keyquery.report.lineage.page:lineage_page",
    ),
    "lineage search": Kind(
        "keyquery.instruments.lineage.index",
        terminal="keyquery.report.lineage.terminal:relatives_lines",
    ),
    "look": Kind(
        "keyquery.instruments.look.reading",
        terminal="keyquery.report.look.terminal:look_lines",
        figures={
            "auto": "keyquery.report.look.figure:default_figure",
            "triangle": "keyquery.report.look.figure:triangle_figure",
            "map": "keyquery.report.look.figure:symmetry_map",
        },
        page="keyquery.report.look.page:look_page",
        svg="keyquery.report.look.figure:triangle_svg",
    ),
    "monitor": Kind(
        "keyquery.instruments.monitor.reading",
        terminal="keyquery.report.monitor.terminal:monitor_lines",
        figures={"map": "keyquery.report.monitor.figure:head_map"},
        page="keyquery.report.monitor.page:monitor_page",
    ),
    "npt explanation": Kind(
        "keyquery.estimators.npt.explanation",
        figures={"explanation": "keyquery.report.npt.figure:explanation"},
    ),
    "primal": Kind("keyquery.layers.primal.spectrum"),
    "projection": Kind("keyquery.instruments.cooccurrence.cooccurrence"),
    "ranking scores": Kind(
        "keyquery.instruments.rankings.rankings",
        terminal="keyquery.report.rerank.terminal:scores_lines",
    ),
    "reranking": Kind(
        "keyquery.estimators.rerank.reading",
        terminal="keyquery.report.rerank.terminal:reranking_lines",
        figures={"moves": "keyquery.report.rerank.figure:moves"},
        page="keyquery.report.rerank.page:moves_page",
    ),
    "roles": Kind(
        "keyquery.instruments.roles.roles",
        terminal="keyquery.report.roles.terminal:roles_lines",
        figures={"map": "keyquery.report.roles.figure:role_map"},
        page="keyquery.report.roles.page:roles_page",
    ),
    "survey": Kind(
        "keyquery.survey.reading",
        terminal="keyquery.report.survey.terminal:survey_lines",
        page="keyquery.report.survey.page:survey_page",
    ),
    "time kernel": Kind(
        "keyquery.layers.time.reading",
        figures={"lags": "keyquery.report.time.figure:lags"},
    ),
    "transport": Kind(
        "keyquery.instruments.transport.transport",
        terminal="keyquery.report.transport.terminal:transport_lines",
        figures={"ways": "keyquery.report.transport.figure:ways"},
        page="keyquery.report.transport.page:transport_page",
    ),
    "wiring": Kind(
        "keyquery.instruments.attribution.wiring",
        terminal="keyquery.report.attribution.terminal:wiring_lines",
        figures={"map": "keyquery.report.attribution.figure:wiring_map"},
        page="keyquery.report.attribution.page:wiring_page",
    ),
}
# Files of fitted estimators say their class.
ESTIMATORS = {
    "EventModel": "keyquery.estimators.events.model",
    "InContextClassifier": "keyquery.estimators.in_context.classifier",
    "NPTClassifier": "keyquery.estimators.npt.estimators",
    "NPTRegressor": "keyquery.estimators.npt.estimators",
    "Reranker": "keyquery.estimators.rerank.learned",
    "SeriesClassifier": "keyquery.estimators.series.classifier",
    "VisualParser": "keyquery.estimators.vision_language.parser",
}


def kinds() -> dict[str, Kind]:
    """All kinds: the table, and what plug-ins add to it."""
    return {**KINDS, **{name: kind for plugin in plugins() for name, kind in plugin.KINDS.items()}}


def imported(path: str) -> Callable[..., Any]:
    """The function or class that "module:name" names."""
    module, name = path.split(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
