"""A look as tables in the terminal: a row per head with its parts as a bar, and further tables on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, Any

from keyquery.checkpoints.labels import family_of, name_of
from keyquery.forms.parts import PARTS
from keyquery.instruments.ablation.needs import costs_without
from keyquery.instruments.look.embeddings import NAMES, level
from keyquery.instruments.look.reading import Look
from keyquery.instruments.look.show.shares import (
    BARS,
    CHANGES,
    EVIDENCE,
    OF_DATA,
    OF_WEIGHTS,
    has_data,
    labelled,
    mean_shares,
    part_names,
    sample_of,
)
from keyquery.instruments.roles.show import role_name, role_table, rule
from keyquery.pages.tables import Text, columns_table
from keyquery.support.printable import counted

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement

# Distinct for every kind of colour vision, in light and dark terminals, and by shape without colour.
SIGNS = (("█", "blue"), ("▓", "yellow"), ("▒", "magenta"), ("▞", "green"), ("░", "white"), ("▚", "cyan"))
MARKS = dict(zip(BARS, SIGNS, strict=True))
WIDEST, NARROWEST = 24, 8  # characters of a bar
MAX_HEADS = 160
COSTLIEST = 3  # heads whose needs are spelled out
MAX_DIRECTIONS = 80  # rows; more would scroll the labels out of view
CELL = 36  # characters; two cells and the head fit into 80 columns


def lines(reading: Look) -> list[Any]:
    """Legend, one row per head (or per layer if there are many heads), footnotes, and the labels."""
    few = len(reading.heads) <= MAX_HEADS
    table = _heads_table(reading) if few else _layers_table(reading)
    shown = [*_title(reading), legend(reading), table, *footnotes([reading], few, few)]
    shown += [*_directions_table(reading), *corpus_table(reading)] if few else []
    return [*shown, *_roles_table(reading), *_summary(reading)]


def legend(look: Look, over: str | None = None) -> Any:
    """What bars are shares of, the window, and the marks of the parts."""
    parts = Text("  ").join(Text.assemble(MARKS[name], f" {name}") for name in part_names(look))
    of = OF_DATA if has_data(look) else OF_WEIGHTS
    return Text.assemble(f"bars: {f'{of}, {over}' if over else of}\n", parts)


class Bar:
    """Shares as one bar, as wide as the column allows; the remainder to 1 is blank."""

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares = shares

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement  # on use, as pages do not need rich

        return Measurement(NARROWEST, WIDEST).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        wide = min(options.max_width, WIDEST)
        sums = accumulate(self.shares)
        ends = list(accumulate((round(wide * min(max(end, 0.0), 1.0)) for end in sums), max))  # negative shares are 0
        pieces = zip([0, *ends[:-1]], ends, MARKS.values(), strict=False)
        yield Text.assemble(*((mark * (end - start), colour) for start, end, (mark, colour) in pieces))


def bar_of(heads: Sequence[Mapping[str, Any]], look: Look) -> Any:
    """The mean bar of heads; none for cross-attention in a look on data, whose bar would not be comparable."""
    shown = [head for head in heads if head["on_data"] or not has_data(look)]
    return Bar(mean_shares(shown)) if shown else Text("not on data", style="dim")


def symmetry(heads: Sequence[Mapping[str, Any]], view: str) -> str:
    """The mean symmetry of heads in a view, with a mark if its sign depends on the window."""
    values = [head[view]["symmetry"] for head in heads if "symmetry" in (head[view] or {})]
    if not values:
        return "–"
    mark = CHANGES if view == "on_data" and any(map(_changes_sign, heads)) else ""
    return f"{sum(values) / len(values):+z.2f}{mark}"


def _changes_sign(head: Mapping[str, Any]) -> bool:
    """Whether the sign of symmetry differs between the half and the full window."""
    return "symmetry" in ((head["on_data"] or {}).get("changes_with_window") or [])


def _title(reading: Look) -> list[Any]:
    model = reading.model
    architecture = f", architecture {family}" if (family := family_of(model)) else ""
    shown = f"{len(reading.layers)} of " if len(reading.layers) < model["layers"] else ""
    layers = f"{shown}{counted(model['layers'], 'layer')}, {counted(len(reading.heads), 'head')}"
    title = Text(f"{model['name']}{architecture}: {layers}, width {model['width']}", style="bold")
    return [title, Text(f"on {sample_of(reading)}")] if reading.provenance.get("data") else [title]


def filled(first: str, names: Sequence[str], columns: Sequence[tuple[Any, Sequence[Any]]]) -> Any:
    """A table of columns, each a title and its cells, without those that have nothing in them."""
    shown = [(title, cells) for title, cells in columns if any(cells)]
    table = columns_table(first, *(title for title, _ in shown))
    for name, *cells in zip(names, *(cells for _, cells in shown), strict=True):
        table.add_row(Text(name), *cells)
    return table


def _heads_table(reading: Look) -> Any:
    heads, on_data = reading.heads, has_data(reading)
    views = {"raw": "raw", "folded": "folded", **({"on_data": "on data"} if on_data else {})}
    columns: list[tuple[Any, list[Any]]] = [
        (Text("parts"), [bar_of([head], reading) for head in heads]),
        ("largest\nshare", [_largest(head["on_data"]) for head in heads if on_data]),
        ("nats:\nhead off", [_off(head) for head in heads]),
        ("nats: cost-\nliest part", [_costliest(head) for head in heads]),
        *((f"symmetry\n{name}", [symmetry([head], view) for head in heads]) for view, name in views.items()),
        ("rank\nraw", [f"{head['raw']['effective_rank']:.0f}" for head in heads]),
        (Text("label"), [", ".join([labelled(head), *head.get("properties", [])]) for head in heads]),
        (Text("role"), [_roles_of([head]) for head in heads]),
    ]
    table = filled("head", [name_of(reading.model, head["layer"], head["head"]) for head in heads], columns)
    next(column for column in table.columns if str(column.header) == "label").min_width = len("undecided~")
    return table


def _layers_table(reading: Look) -> Any:
    members = [[head for head in reading.heads if head["layer"] == layer["layer"]] for layer in reading.layers]
    raw = [layer["raw"] for layer in reading.layers]
    values = [sorted(head["raw"]["symmetry"] for head in heads) for heads in members]
    columns: list[tuple[Any, list[Any]]] = [
        (Text("parts, mean over heads"), [bar_of(heads, reading) for heads in members]),
        ("symmetry raw\nof the layer", [f"{row['symmetry']:+z.2f}" for row in raw]),
        ("column direc-\ntionality, raw", [f"{row['column_directionality']:+z.2f}" for row in raw]),
        ("symmetry raw\nof its heads", [f"{of_heads[0]:+z.2f} … {of_heads[-1]:+z.2f}" for of_heads in values]),
        (Text("roles of its heads"), [_roles_of(heads) for heads in members]),
    ]
    return filled("layer", [name_of(reading.model, layer["layer"]) for layer in reading.layers], columns)


def _largest(data: Mapping[str, Any] | None) -> str:
    if data is None:
        return "–"
    part = max((part for part in BARS if part in data), key=data.__getitem__)
    ends = data.get("intervals", {}).get(part)
    half = "" if ends is None else f" ±{50 * (ends[1] - ends[0]):.0f}"
    return f"{100 * data[part]:.0f}{half} %"


def _off(head: Mapping[str, Any]) -> str:
    """What it costs to switch a head off, if that is known."""
    cost = head.get("ablation", {}).get("zero")
    return "" if cost is None else f"{cost[0]:.3f}"


def _costliest(head: Mapping[str, Any]) -> Any:
    """The part whose absence costs most, by its mark, and its cost."""
    costs = {name: cost[0] for name, cost in costs_without(head.get("ablation", {})).items() if name in PARTS}
    part = max(costs, key=costs.__getitem__, default=None)
    return Text() if part is None else Text.assemble(MARKS[part], f" {costs[part]:.3f}")


def footnotes(looks: Sequence[Look], labels: bool, shares: bool = False) -> list[str]:
    """Explanations of the marks that occur in a table, which may have the columns `labels` and largest `shares`."""
    heads = [head for look in looks for head in look.heads]
    data = [head["on_data"] for head in heads if head["on_data"]]
    evidence = {head.get("evidence") for head in heads} if labels else set()
    notes = {
        f"{EVIDENCE['estimated']} label from estimated costs": "estimated" in evidence,
        f"{EVIDENCE['weights']} label from the weights only": "weights" in evidence,
        f"{CHANGES} sign differs in the first half of each window": any(map(_changes_sign, heads)),
        "± half-width of the 95 % interval over sequences": shares and any(m.get("intervals") for m in data),
    }
    if data:
        low, high = (end(metrics["interaction"] for metrics in data) for end in (min, max))
        between = f"2·covariances between parts, here {100 * low:+z.0f} to {100 * high:+z.0f} %"
        notes[f"parts and interaction ({between}) sum to 100 %"] = True
    shown = [f"{note}." for note, holds in notes.items() if holds]
    return ["", *shown] if shown else []


def _summary(reading: Look) -> list[str]:
    together = (
        f"{name.replace('_', ' ')} {median(layer['raw'][name] for layer in reading.layers):+z.2f}"
        for name in ("symmetry", "column_directionality")
    )
    shown = [f"\nAll heads of a layer together, raw, median over layers: {', '.join(together)}."]
    if not has_data(reading):
        shown.append(f"Random weights have symmetry 1/width = {1 / reading.model['width']:.3f}.")
        how = " For shares of score variance on data: --text FILE."
        shown.append(f"Weights alone decide few labels.{'' if reading.model.get('family') == 'custom' else how}")
    shown += [f"Labels: {label_counts(reading)}.", *_needs(reading)]
    if len(reading.heads) > MAX_HEADS:
        shown.append("For single heads: --layers to select some, --csv or --json for all.")
    notes = sorted({note for layer in reading.layers for note in layer.get("notes", [])})
    facts = [reading.provenance.get(of) or {} for of in ("data", "costs")]
    return shown + [f"Note: {note}." for note in [*notes, *(fact["note"] for fact in facts if fact.get("note"))]]


def label_counts(reading: Look) -> str:
    """How many heads have each label."""
    return ", ".join(f"{count} {label}" for label, count in reading.summary.items())


def _needs(reading: Look) -> list[str]:
    """What labels by costs rest on, and what the costliest heads need."""
    costs = reading.provenance.get("costs") or {}
    if "threshold" not in costs:
        return []
    limit = f"{costs['threshold']} {costs['unit']} on {costs['sequences']} sequences"
    first = sorted(filter(_off, reading.heads), key=lambda head: -head["ablation"]["zero"][0])[:COSTLIEST]
    return [
        f"A head needs the smallest set of parts that costs at most {limit}; undecided: the interval contains it.",
        *(f"  {name_of(reading.model, head['layer'], head['head'])} {head['reason']}." for head in first),
    ]


# On request


def corpus_table(reading: Look) -> list[Any]:
    """A row per head: cosine similarity of its parts with those of the corpus, null levels, and explained share."""
    facts = reading.corpus
    if facts is None:
        return []
    heads = [head for head in reading.heads if "corpus" in head]
    names = [name_of(reading.model, head["layer"], head["head"]) for head in heads]
    columns = [(name.replace("_", " "), [_beside_null(head["corpus"], name) for head in heads]) for name in NAMES]
    table = filled("head", names, columns)
    where = f"{facts['from']}, " if facts.get("from") else ""
    tokens = f"{facts['tokens']:,} tokens, " if facts.get("tokens") else ""
    pairs = f"{where}{tokens}pairs of its {facts['compared']} most frequent tokens"
    above = [sum(abs(h["corpus"][name]) > level(h["corpus"], name) for h in heads) for name in NAMES]
    counts = f"{above[0]} in the symmetric part, {above[1]} in the skew part"
    return [
        Text(""),
        Text(f"{reading.model['name']} against {pairs}", style="bold"),
        table,
        f"\nAbove the null level, of {len(heads)} heads: {counts}; a negative cosine opposes the corpus.",
        "Cosines with the corpus PPMI; in parentheses the 95th percentile of random heads or shuffled tokens.",
        "skew: positive attends to tokens that follow in the corpus, negative to tokens that precede.",
    ]


def _beside_null(metrics: Mapping[str, float], name: str) -> Any:
    """A value with its null level in parentheses; dim if it does not exceed it."""
    value, null = metrics[name], level(metrics, name)
    text = f"{value:.1%} ({null:.1%})" if name == "explained" else f"{value:+z.2f} ({null:.2f})"
    return Text(text, style="" if abs(value) > null else "dim")


def _directions_table(reading: Look) -> list[Any]:
    """A row per direction: the tokens at both of its ends, and query-key pairs of tokens."""
    rows = []
    for head in reading.heads:
        name = name_of(reading.model, head["layer"], head["head"])
        for number, direction in enumerate(head.get("objects", [])):
            ends = " … ".join(" ".join(direction[end][:3]) for end in ("tokens", "opposite"))
            planes = head["relations"][number : number + 1]
            pairs = ", ".join("→".join(pair) for plane in planes for pair in plane["pairs"][:3])
            rows.append(("" if number else name, ends, pairs))
    if len(rows) > MAX_DIRECTIONS:
        return ["", f"{len(rows)} token directions: use --html to see all, or --layers to select some."]
    table = columns_table("head", "symmetric: from one end to the other", "skew: query → key")
    for column in table.columns[1:]:
        column.justify, column.max_width, column.overflow = "left", CELL, "ellipsis"
    for row in rows:
        table.add_row(*map(Text, row))
    return ["", table] if rows else []


def _has_roles(look: Look) -> bool:
    return any("roles" in head for head in look.heads)


def _roles_of(heads: Sequence[Mapping[str, Any]]) -> str:
    """The most specific role of each head, counted if several heads share it."""
    counts = Counter(role_name(role) for head in heads if (role := head.get("roles", {}).get("role")))
    return ", ".join(role if count == 1 else f"{count} {role}" for role, count in counts.most_common())


def _roles_table(reading: Look) -> list[Any]:
    """A row per role with its strongest heads."""
    if not _has_roles(reading):
        return []
    heads = [{**head, **head["roles"]} for head in reading.heads if "roles" in head]
    facts = reading.provenance.get("roles") or {}
    notes = [f"Note: {note}." for note in facts.get("notes", [])]
    title = Text(f"{reading.model['name']}: heads by role", style="bold")
    return [Text(""), title, role_table(heads, reading.model), *rule(facts), *notes]
