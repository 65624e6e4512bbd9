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
from keyquery.pages.figures import signed_map
from keyquery.pages.tables import Table, Text
from keyquery.support.printable import counted

LISTED = 48  # rows of a table; if there are more, those with the largest changes


def lines(reading: Ablation) -> list[Any]:
    """How estimates agree with measurements; then a row per head, layer or set, and a column per change."""
    changes = list(dict.fromkeys(row["part"] for row in reading.rows))
    cells: dict[str, dict[str, Any]] = {}
    for row in reading.rows:
        cells.setdefault(_name(reading.model, row), {})[row["part"]] = row
    names = list(cells)
    if len(names) > LISTED:
        names = sorted(names, key=lambda name: -max(abs(row["change"]) for row in cells[name].values()))[:LISTED]
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(reading.by, no_wrap=True)
    for change in changes:
        table.add_column(WHOLE.get(change, change), justify="right")  # wraps the interval in a narrow terminal
    for name in names:
        table.add_row(
            Text(name), *(_change(cells[name][change]) if change in cells[name] else "" for change in changes)
        )
    loss = f"loss {reading.loss:.3f} over" if reading.loss else ""
    title = f"{reading.model['name']}: {loss} {reading.sequences} sequences; change in {reading.unit}"
    lines = [Text(title, style="bold"), *_agreement(reading), table, "", NOTE, *_counts(reading)]
    if len(names) < len(cells):
        lines.append(f"The {LISTED} of {len(cells)} rows with the largest changes; --csv or --json for all.")
    return lines


NOTE = "*: the 95 % interval of the change excludes 0; intervals are not corrected for multiple comparisons."
WORDS = {"rank_correlation": "rank correlation", "inside": "share of estimates within the noise of the measurement"}


def _agreement(reading: Ablation) -> list[Any]:
    """The check of estimates on this model; a warning above the table where it is poor."""
    if reading.check is None:
        return []
    check, poor = reading.check, " and ".join(WORDS[name] for name in reading.check["poor"])
    warning = Text(f"Estimates are poor for this model and text ({poor}): use --measure all.", style="bold red")
    fit = f"rank correlation {check['rank_correlation']:.2f}, slope {check['slope']:.2f}, {check['inside']:.0%} inside"
    facts = Text(f"estimates against measurements of {check['cells']} cells: {fit} the noise", style="dim")
    return [warning, facts] if poor else [facts]


def _counts(reading: Ablation) -> list[str]:
    """How many costs are estimated, which are marked ~, and how many cannot be told from the threshold."""
    estimated = sum(row.get("evidence") == "estimated" for row in reading.rows)
    across = sum(row["low"] <= reading.threshold <= row["high"] for row in reading.rows)
    notes = [f"~: estimated, not measured ({estimated} of {len(reading.rows)})."] if estimated else []
    if across:
        notes.append(f"{across} of {len(reading.rows)} intervals contain the threshold of {reading.threshold:g}.")
    return notes


def _name(model: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """The head, key head, layer or set of a row."""
    if row["layer"] is None:
        return str(row.get("set") or "all")
    if row.get("key_head") is not None:
        return f"{name_of(model, row['layer'])} key head {row['key_head']}"
    # The two kernels of an MLA head are changed together.
    return name_of(model, row["layer"], row["head"]).replace(" rope", " nope+rope")


def _change(row: Mapping[str, Any]) -> Any:
    half = (row["high"] - row["low"]) / 2
    excludes = row["low"] > 0 or row["high"] < 0
    mark = "~" if row.get("evidence") == "estimated" else ""
    text = f"{mark}{row['change']:+z.4f} ±{half:.4f}{'*' if excludes else ' '}"
    return Text(text, style="bold" if excludes else "dim")


def ablation_map(reading: Ablation, pyplot: Any) -> Any:
    """A panel per part, layers by heads: the change of the loss on a common scale; yellow is a decrease."""
    parts = list(dict.fromkeys(row["part"] for row in reading.rows))
    layers = 1 + max(row["layer"] or 0 for row in reading.rows)
    heads = 1 + max(map(_column, reading.rows))
    most = max(abs(row["change"]) for row in reading.rows)
    size = (len(parts) * max(0.7 + 0.25 * heads, 1.5) + 0.9, 1.4 + 0.25 * layers)
    figure, axes = pyplot.subplots(1, len(parts), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for axis, part in zip(axes[0], parts, strict=True):
        grid = [[float("nan")] * heads for _ in range(layers)]
        for row in reading.rows:
            if row["part"] == part:
                grid[row["layer"] or 0][_column(row)] = row["change"]
        colour = LIGHT.get(part, "#8250df")
        signed_map(axis, grid, most, below="#c8a600", above=colour, location="bottom", shrink=0.9)
        axis.set_facecolor("#c4cbd2")  # distinguishes unmeasured cells from zero
        axis.set_title(WHOLE.get(part, f"{part} ablated"), color=colour)
        axis.set_xticks(range(heads) if reading.by == "head" else [])
        axis.set_xlabel("head" if reading.by == "head" else "all heads")
        axis.yaxis.get_major_locator().set_params(integer=True)
    if reading.by == "all":
        axes[0][0].set_yticks([])
    axes[0][0].set_ylabel("all layers" if reading.by == "all" else "layer")
    figure.suptitle(f"{reading.model['name']}: change of the loss ({reading.loss:.2f})")
    return figure


def _column(row: Mapping[str, Any]) -> int:
    """Head, or key head, of a row; 0 if it is of several."""
    return int(row.get("key_head") or 0) if row["head"] is None else int(row["head"])


FIGURES = {"map": ablation_map}


def cost_measures(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the loss gains per item without each part, from `{part: (change, low, high)}`: the largest, then all."""
    named = dict.fromkeys(part for row in rows for part in row)
    parts = sorted(named, key=[*PARTS, *(part for part in named if part not in PARTS)].index)
    if not parts:
        return []
    facts: dict[str, Any] = {"group": "change of the loss", "unit": "nats per token", "form": "change", "digits": 3}
    facts |= {"hatch": True, "tones": ["var(--gain)", "var(--warm)"]}
    none = [None, None, None]
    largest = [max(row.values(), key=lambda cost: cost[0]) if row else none for row in rows]
    shown = [("cost", "largest cost of a part", "cost", largest)]
    for part in parts:
        label = WHOLE.get(part, f"{part} ablated")
        shown.append((f"off.{part}", f"loss, {label}", part, [row.get(part, none) for row in rows]))
    measures = []
    for key, label, name, costs in shown:
        values, low, high = zip(*costs, strict=True)
        measures.append(measure(key, label, values, low=low, high=high, short=name, **facts))
    return measures


def page(reading: Ablation) -> str:
    """The costs of parts: a map of heads (or layers) that opens on the largest, and the costs of one; or a table."""
    facts = f"loss {reading.loss:.3f} over {counted(reading.sequences, 'sequence')} · by {reading.by}"
    summary = {"type": "summary", "sentences": [_sentence(reading)]}
    tab: dict[str, Any] = {"blocks": [summary, _row_table(reading)]}
    if reading.by in ("head", "layer") and all(row["layer"] is not None for row in reading.rows):
        tab = _cost_map(reading, summary)
    notes = versioned(["Intervals are not corrected for multiple comparisons"], reading.provenance)
    return document(str(reading.model["name"]), "ablation", [tab], facts, notes)


def _cost_map(reading: Ablation, summary: dict[str, Any]) -> dict[str, Any]:
    costs: dict[tuple[int, int], dict[str, Any]] = {}
    for row in reading.rows:
        cell = costs.setdefault((row["layer"], _column(row)), {})
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
        "measures": [part["key"] for part in off],
        "names": [part["short"] for part in off],
        "tones": [f"var(--{part['short']})" if part["short"] in PARTS else "var(--muted)" for part in off],
        "dots": True,
        "hollow": "zero",
        "form": "change",
    }
    items = [{"blocks": [{"of": 0}]}] * len(heads)
    blocks = [
        summary,
        {"type": "map", "place": "seven", "quick": [part["key"] for part in measures]},
        {"type": "detail", "place": "five", "items": items, "blocks": [chart]},
        {"type": "items"},
    ]
    row, across = max(zip(measures[0]["values"], frame["cells"], strict=True))[1]
    at = f"{frame['rows'][row]}.{frame['columns'][across]}"
    return {"frame": frame, "state": {"at": at, "map": "cost"}, "blocks": blocks}


def _sentence(reading: Ablation) -> str:
    """The costliest ablation, and how many have a change that is not noise."""
    top = max(reading.rows, key=lambda row: row["change"])
    sure = sum(row["low"] > 0 or row["high"] < 0 for row in reading.rows)
    where, what = _name(reading.model, top), WHOLE.get(top["part"], f"{top['part']} ablated")
    of = f"{sure} of {len(reading.rows)} changes have an interval that excludes 0"
    return f"Costliest: {where}, {what}, {top['change']:+.3g} {reading.unit}; {of}."


def _row_table(reading: Ablation) -> dict[str, Any]:
    rows = reading.rows
    columns = [column("heads", [_name(reading.model, row) for row in rows])]
    columns += [column(name, [row.get(name, "measured") for row in rows]) for name in ("part", "evidence")]
    ends = {name: [row[name] for row in rows] for name in ("low", "high")}
    columns.append(column("change of the loss", [row["change"] for row in rows], form="change", interval=True, **ends))
    return {"type": "table", "title": "All ablations", "columns": columns, "top": LISTED}
