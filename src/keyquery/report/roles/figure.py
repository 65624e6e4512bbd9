"""Head roles as a figure: layers by heads, in the colour of each head's role or by the score of one role."""

from __future__ import annotations

from typing import Any

import numpy as np

from keyquery.instruments.roles.naming import decided
from keyquery.instruments.roles.patterns import ROLES
from keyquery.instruments.roles.roles import Roles
from keyquery.pages.colours import LIGHT
from keyquery.pages.colours import ROLES as TONES
from keyquery.report.roles.rule import role_name
from keyquery.support.checks import check_choice
from keyquery.support.extras import optional


def role_map(reading: Roles, pyplot: Any, role: str | None = None, title: str | None = None) -> Any:
    """Every head in the colour of its most specific role, or by its score of one `role`."""
    if role is not None:
        check_choice("role", role, ROLES)
    rows, columns = (1 + max(head[way] for head in reading.heads) for way in ("layer", "head"))
    size = (2.6 + 0.25 * columns, 1.0 + 0.2 * rows)
    figure, axis = pyplot.subplots(figsize=size, layout="constrained")
    colours, values = optional("matplotlib.colors", "plot"), np.full((rows, columns), np.nan)
    for head in reading.heads:
        values[head["layer"], head["head"]] = _value(head, role)
    if role is None:
        palette = colours.ListedColormap([TONES[name] for name in ROLES])
        axis.imshow(values, vmin=-0.5, vmax=len(ROLES) - 0.5, cmap=palette, aspect="auto")
        shown = [at for at, name in enumerate(ROLES) if (values == at).any()]
        marks = [pyplot.Line2D([], [], marker="s", linestyle="", color=TONES[ROLES[at]]) for at in shown]
        labels = [role_name(ROLES[at]) for at in shown]
        axis.legend(marks, labels, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    else:
        ramp = colours.LinearSegmentedColormap.from_list("score", ["#f2f4f6", LIGHT["symmetric"]])
        figure.colorbar(axis.imshow(values, vmin=0, vmax=1, cmap=ramp, aspect="auto"), label=f"{role_name(role)} score")
    axis.set(xlabel="head", ylabel="layer", title=title or reading.model["name"])
    axis.locator_params(integer=True, nbins=12)
    return figure


def _value(head: Any, role: str | None) -> float:
    """The number of a head's role, or its score on the data that decides on `role`; NaN if it has none."""
    if role is None:
        return float("nan") if head["role"] is None else float(ROLES.index(head["role"]))
    of_role = head["scores"].get(role, {})
    data = decided(role, of_role)
    return float("nan") if data is None else float(of_role[data]["score"])
