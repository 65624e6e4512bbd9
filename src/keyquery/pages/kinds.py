"""The display functions of each kind of reading, by name and imported on use, so that one kind loads no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from keyquery.reading import Reading
from keyquery.support.plugins import plugins


class Display(NamedTuple):
    """The functions that display a kind of reading, each as "module:function"."""

    terminal: str = ""
    figures: Mapping[str, str] = MappingProxyType({})
    page: str = ""
    svg: str = ""


REPORT = "keyquery.report"
LOOK = {
    "figures": {
        "auto": f"{REPORT}.look.figure:default_figure",
        "triangle": f"{REPORT}.look.figure:triangle_figure",
        "map": f"{REPORT}.look.figure:symmetry_map",
    },
    "page": f"{REPORT}.look.page:look_page",
    "svg": f"{REPORT}.look.figure:triangle_svg",
}
DISPLAYS: dict[str, Display] = {
    "look": Display(terminal=f"{REPORT}.look.terminal:look_lines", **LOOK),  # type: ignore[arg-type]
    "comparison": Display(terminal=f"{REPORT}.look.terminal:comparison_lines", **LOOK),  # type: ignore[arg-type]
    "ablation": Display(
        terminal=f"{REPORT}.ablation.terminal:ablation_lines",
        figures={"map": f"{REPORT}.ablation.figure:ablation_map"},
    ),
    "attribution": Display(
        terminal=f"{REPORT}.attribution.terminal:attribution_lines",
        figures={"map": f"{REPORT}.attribution.figure:attribution_map"},
        page=f"{REPORT}.attribution.page:attribution_page",
    ),
    "wiring": Display(
        terminal=f"{REPORT}.attribution.terminal:wiring_lines",
        figures={"map": f"{REPORT}.attribution.figure:wiring_map"},
        page=f"{REPORT}.attribution.page:wiring_page",
    ),
    "dial effect": Display(terminal=f"{REPORT}.ablation.terminal:dial_effect_lines"),
    "causes": Display(
        terminal=f"{REPORT}.causes.terminal:causes_lines",
        figures={"graphs": f"{REPORT}.causes.figure:graph_figure"},
        page=f"{REPORT}.causes.page:graph_page",
        svg=f"{REPORT}.causes.svg:svg",
    ),
    "discovery": Display(
        terminal=f"{REPORT}.discover.terminal:discovery_lines",
        figures={"graph": f"{REPORT}.discover.figure:graph_figure"},
        page=f"{REPORT}.discover.page:discovery_page",
        svg=f"{REPORT}.discover.figure:svg",
    ),
    "explanation": Display(terminal=f"{REPORT}.causes.terminal:explanation_lines"),
    "depth": Display(
        terminal=f"{REPORT}.depth.terminal:depth_lines", figures={"plane": f"{REPORT}.depth.figure:plane"}
    ),
    "flow": Display(
        terminal=f"{REPORT}.flow.terminal:flow_lines",
        figures={"map": f"{REPORT}.flow.figure:flow_map"},
        page=f"{REPORT}.flow.page:flow_page",
    ),
    "importance": Display(figures={"stretches": f"{REPORT}.series.figure:stretches"}),
    "interactions": Display(figures={"interactions": f"{REPORT}.events.figure:interactions"}),
    "in-context explanation": Display(figures={"explanation": f"{REPORT}.npt.figure:explanation"}),
    "npt explanation": Display(figures={"explanation": f"{REPORT}.npt.figure:explanation"}),
    "ranking scores": Display(terminal=f"{REPORT}.rerank.terminal:scores_lines"),
    "reranking": Display(
        terminal=f"{REPORT}.rerank.terminal:reranking_lines",
        figures={"moves": f"{REPORT}.rerank.figure:moves"},
        page=f"{REPORT}.rerank.page:moves_page",
    ),
    "lineage": Display(terminal=f"{REPORT}.lineage.terminal:lineage_lines", page=f"{REPORT}.lineage.page:lineage_page"),
    "lineage search": Display(terminal=f"{REPORT}.lineage.terminal:relatives_lines"),
    "monitor": Display(
        terminal=f"{REPORT}.monitor.terminal:monitor_lines",
        figures={"map": f"{REPORT}.monitor.figure:head_map"},
        page=f"{REPORT}.monitor.page:monitor_page",
    ),
    "roles": Display(
        terminal=f"{REPORT}.roles.terminal:roles_lines",
        figures={"map": f"{REPORT}.roles.figure:role_map"},
        page=f"{REPORT}.roles.page:roles_page",
    ),
    "survey": Display(terminal=f"{REPORT}.survey.terminal:survey_lines", page=f"{REPORT}.survey.page:survey_page"),
    "time kernel": Display(figures={"lags": f"{REPORT}.time.figure:lags"}),
    "transport": Display(
        terminal=f"{REPORT}.transport.terminal:transport_lines",
        figures={"ways": f"{REPORT}.transport.figure:ways"},
        page=f"{REPORT}.transport.page:transport_page",
    ),
}


def display_of(reading: Reading) -> Display:
    """The display of a reading; an unknown kind has an empty one, which shows its records."""
    if (known := DISPLAYS.get(reading.kind)) is not None:
        return known
    return next((p.DISPLAYS[reading.kind] for p in plugins() if reading.kind in p.DISPLAYS), Display())


def imported(path: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, name = path.split(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
