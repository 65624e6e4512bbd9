"""The change of the loss when parts of heads are ablated, in the terminal and as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keyquery.checkpoints.labels import name_of
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.ablate import Ablation
from keyquery.pages.colours import LIGHT, WHOLE
from keyquery.pages.components import column, heads_frame, measure, versioned
from keyquery.pages.document import document
from keyquery.pages.tables import Table, Text
from keyquery.support.extras import optional
from keyquery.support.printable import counted

LISTED = 48  # rows of a table; if there are more, those with the largest changes


def lines(reading: Ablation) -> list[Any]:
    """A row per head (or layer), a column per part; changes whose interval excludes 0 are marked."""
    if reading.by == "direction":
        return _direction_lines(reading)
    parts = list(dict.fromkeys(row["part"] for row in reading.rows))
    cells: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in reading.rows:
        cells.setdefault((row["layer"], row["head"]), {})[row["part"]] = row
    places = list(cells)
    cut = len(places) > LISTED
    if cut:
        places = sorted(places, key=lambda place: -max(abs(row["change"]) for row in cells[place].values()))[:LISTED]
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(reading.by, no_wrap=True)
    for part in parts:
        table.add_column(WHOLE.get(part, part), justify="right")  # wraps the interval in a narrow terminal
    for place in places:
        table.add_row(Text(_name(reading.model, *place)), *(_change(cells[place][part]) for part in parts))
    loss = f"loss {reading.loss:.3f} over {reading.sequences} sequences"
    title = f"{reading.model['name']}: {loss}; change with one part ablated"
    notes = ["", NOTE]
    if cut:
        notes.append(f"The {LISTED} of {len(cells)} rows with the largest changes; --csv or --json for all.")
    return [Text(title, style="bold"), table, *notes]


NOTE = "*: the 95 % interval of the change excludes 0; intervals are not corrected for multiple comparisons."
MATRIX = {"singular": "‖M‖²", "symmetric": "‖S‖²", "skew": "‖A‖²"}


def _direction_lines(reading: Ablation) -> list[Any]:
    """A row per direction, the costliest first."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("head", no_wrap=True)
    kind = reading.rows[0]["part"]
    for title in (f"{kind} direction", "value", f"share of {MATRIX[kind]}", "change of the loss"):
        table.add_column(title, justify="right")
    for row in reading.rows[:LISTED]:
        numbers = str(row["direction"]), f"{row['value']:.3g}", f"{row['share']:.1%}"
        table.add_row(Text(_name(reading.model, row["layer"], row["head"])), *numbers, _change(row))
    loss = f"loss {reading.loss:.3f} over {reading.sequences} sequences"
    title = f"{reading.model['name']}: {loss}; change with one direction ablated"
    cut = f" The {LISTED} costliest of {len(reading.rows)}; --csv or --json for all."
    return [Text(title, style="bold"), table, "", NOTE + (cut if len(reading.rows) > LISTED else "")]


def _name(model: Mapping[str, Any], layer: int | None, head: int | None) -> str:
    # The two kernels of an MLA head are changed together.
    return "all" if layer is None else name_of(model, layer, head).replace(" rope", " nope+rope")


def _change(row: Mapping[str, Any]) -> Any:
    half = (row["high"] - row["low"]) / 2
    sure = row["low"] > 0 or row["high"] < 0
    return Text(f"{row['change']:+z.4f} ±{half:.4f}{'*' if sure else ' '}", style="bold" if sure else "dim")


BARS = 40  # most directions of a figure


def ablation_map(reading: Ablation, pyplot: Any) -> Any:
    """A panel per part, layers by heads: the change of the loss on a common scale; yellow is a decrease."""
    if reading.by == "direction":
        return _direction_bars(reading, pyplot)
    parts = list(dict.fromkeys(row["part"] for row in reading.rows))
    layers = 1 + max(row["layer"] or 0 for row in reading.rows)
    heads = 1 + max(row["head"] or 0 for row in reading.rows)
    most = max(abs(row["change"]) for row in reading.rows) or 1.0
    size = (len(parts) * max(0.7 + 0.25 * heads, 1.5) + 0.9, 1.4 + 0.25 * layers)
    figure, axes = pyplot.subplots(1, len(parts), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for axis, part in zip(axes[0], parts, strict=True):
        grid = [[float("nan")] * heads for _ in range(layers)]
        for row in reading.rows:
            if row["part"] == part:
                grid[row["layer"] or 0][row["head"] or 0] = row["change"]
        colour = LIGHT.get(part, "#8250df")
        steps = ["#c8a600", "#f2f4f6", colour]
        colours = optional("matplotlib.colors", "plot").LinearSegmentedColormap.from_list(part, steps)
        image = axis.imshow(grid, vmin=-most, vmax=most, cmap=colours, aspect="auto")
        axis.set_facecolor("#c4cbd2")  # distinguishes unmeasured cells from zero
        axis.set_title(WHOLE.get(part, f"{part} ablated"), color=colour)
        axis.set_xticks(range(heads) if reading.by == "head" else [])
        axis.set_xlabel("head" if reading.by == "head" else "all heads")
        axis.yaxis.get_major_locator().set_params(integer=True)
        bar = figure.colorbar(image, ax=axis, location="bottom", shrink=0.9, ticks=[-most, 0, most])
        bar.ax.set_xticklabels([f"−{most:.2g}", "0", f"+{most:.2g}"])
    if reading.by == "all":
        axes[0][0].set_yticks([])
    axes[0][0].set_ylabel("all layers" if reading.by == "all" else "layer")
    figure.suptitle(f"{reading.model['name']}: change of the loss ({reading.loss:.2f})")
    return figure


def _direction_bars(reading: Ablation, pyplot: Any) -> Any:
    """A bar per direction with its interval, the costliest on top."""
    rows = reading.rows[:BARS]
    figure, axis = pyplot.subplots(figsize=(6.4, 1.2 + 0.22 * len(rows)), layout="constrained")
    changes = [row["change"] for row in rows]
    errors = [[row["change"] - row["low"] for row in rows], [row["high"] - row["change"] for row in rows]]
    colour = LIGHT.get(rows[0]["part"], "#8250df")
    axis.barh(range(len(rows)), changes, xerr=errors, color=colour, error_kw={"ecolor": "#57606a", "lw": 1})
    axis.set_yticks(range(len(rows)), [f"{row['layer']}.{row['head']}  direction {row['direction']}" for row in rows])
    axis.invert_yaxis()
    axis.axvline(0, color="#57606a", lw=0.8)
    axis.set_xlabel("change of the loss with the direction ablated")
    axis.set_title(f"{reading.model['name']}: {rows[0]['part']} directions, loss {reading.loss:.2f}")
    return figure


FIGURES = {"map": ablation_map}


def cost_measures(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the loss gains per item with each part ablated, from `{part: (change, low, high)}`: the largest, then all.

    What else is known of a change can be added as one more measure here.
    """
    parts = sorted(dict.fromkeys(part for row in rows for part in row), key=_order)
    if not parts:
        return []
    facts: dict[str, Any] = {"group": "change of the loss", "unit": "nats per token", "form": "change", "digits": 3}
    facts["hatch"] = True
    facts["tones"] = ["var(--gain)", "var(--warm)"]
    none = [None, None, None]
    largest = [max(row.values(), key=lambda cost: cost[0]) if row else none for row in rows]
    named = [("cost", "largest cost of a part", "cost", largest)]
    for part in parts:
        label = WHOLE.get(part, f"{part} ablated")
        named.append((f"off.{part}", f"loss, {label}", part, [row.get(part, none) for row in rows]))
    measures = []
    for key, label, name, costs in named:
        values, low, high = zip(*costs, strict=True)
        measures.append(measure(key, label, values, low=low, high=high, short=name, **facts))
    return measures


def _order(part: str) -> int:
    """Parts in their order, whole heads last."""
    return PARTS.index(part) if part in PARTS else len(PARTS)


def page(reading: Ablation) -> str:
    """The costs of parts: a map of heads (or layers) that opens on the largest, and the costs of one; or a table."""
    facts = f"loss {reading.loss:.3f} over {counted(reading.sequences, 'sequence')} · by {reading.by}"
    summary = {"type": "summary", "sentences": [_sentence(reading)]}
    tab: dict[str, Any] = {"blocks": [summary, _row_table(reading)]}
    if reading.by in ("head", "layer"):
        tab = _cost_map(reading, summary)
    notes = versioned(["Intervals are not corrected for multiple comparisons"], reading.provenance)
    return document(str(reading.model["name"]), "ablation", [tab], facts, notes)


def _cost_map(reading: Ablation, summary: dict[str, Any]) -> dict[str, Any]:
    costs: dict[tuple[int, int], dict[str, Any]] = {}
    for row in reading.rows:
        cell = costs.setdefault((row["layer"], row["head"] or 0), {})
        cell[row["part"]] = (row["change"], row["low"], row["high"])
    heads = [{"layer": layer, "head": head} for layer, head in costs]
    measures = cost_measures(list(costs.values()))
    frame = heads_frame(heads, measures, reading.model.get("labels") or [])
    if reading.by == "layer":
        frame |= {"columns": ["all"], "nouns": ["layer", "heads"]}
    off = measures[1:]
    chart = {
        "type": "bars",
        "title": "Cost of each part",
        "note": "change of the loss in nats per token, 95 % interval",
        "measures": [one["key"] for one in off],
        "names": [one["short"] for one in off],
        "tones": [f"var(--{one['short']})" if one["short"] in PARTS else "var(--muted)" for one in off],
        "dots": True,
        "hollow": "zero",
        "form": "change",
    }
    items = [{"blocks": [{"of": 0}]}] * len(heads)
    blocks = [
        summary,
        {"type": "map", "place": "seven", "quick": [one["key"] for one in measures]},
        {"type": "detail", "place": "five", "items": items, "blocks": [chart]},
        {"type": "items"},
    ]
    top = max(range(len(heads)), key=lambda index: measures[0]["values"][index])
    row, column_of = frame["cells"][top]
    at = f"{frame['rows'][row]}.{frame['columns'][column_of]}"
    return {"frame": frame, "state": {"at": at, "map": "cost"}, "blocks": blocks}


def _sentence(reading: Ablation) -> str:
    """The costliest ablation, and how many have a change that is not noise."""
    top = max(reading.rows, key=lambda row: row["change"])
    sure = sum(row["low"] > 0 or row["high"] < 0 for row in reading.rows)
    name = _name(reading.model, top["layer"], top["head"])
    where = f"{name}, direction {top['direction']}" if reading.by == "direction" else name
    what = WHOLE.get(top["part"], f"{top['part']} ablated")
    of = f"{sure} of {len(reading.rows)} changes have an interval that excludes 0"
    return f"Costliest: {where}, {what}, {top['change']:+.3g} nats per token; {of}."


def _row_table(reading: Ablation) -> dict[str, Any]:
    rows = reading.rows
    first = [_name(reading.model, row["layer"], row["head"]) for row in rows]
    columns = [column("head" if reading.by == "direction" else "heads", first)]
    columns.append(column("part", [row["part"] for row in rows]))
    if reading.by == "direction":
        columns += [column(name, [row[name] for row in rows]) for name in ("direction", "value", "share")]
    ends = {name: [row[name] for row in rows] for name in ("low", "high")}
    columns.append(column("change of the loss", [row["change"] for row in rows], form="change", interval=True, **ends))
    return {"type": "table", "title": "All ablations", "columns": columns, "top": LISTED}
