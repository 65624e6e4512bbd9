"""`keyquery discover`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from keyquery.cli.options import STR, Output, argument, command, option
from keyquery.learn.data.tables import Table, load_table
from keyquery.learn.discover.discover import TESTS
from keyquery.learn.discover.discover import discover as find_graph
from keyquery.learn.discovery.search import METHODS
from keyquery.support.checks import check_choice

Pairs = list[str] | None


@command(
    *("json", "csv", "html", "picture"),
    calls=find_graph,
    table=argument(Path, "A delimited text file, such as TABLE.csv; rows are samples."),
    columns=option(str | None, "Columns to use, such as age,bmi,bp. Default: all."),
    test=option(str, f"Test of independence: {', '.join(('auto', *TESTS))}."),
    alpha=option(float, "Significance level of the tests."),
    method=option(str, f"Causal discovery algorithm: {' or '.join(METHODS)}."),
    discrete=option(str | None, "Numeric columns that are categories, such as sex,stage, or all. Default: none."),
    tiers=option(str | None, "Order in time, such as 'age,sex;bmi;bp': no later column causes an earlier one."),
    forbid=option(Pairs, "'bp->age': the first does not cause the second; repeatable.", metavar=STR),
    require=option(Pairs, "'age->bp': this edge is given; repeatable.", metavar=STR),
    lags=option(int, "Rows are in order of time: also use each column at so many rows before.", min=0),
    selection=option(bool, "Allow for selection bias.", False, name="--selection"),
    bootstrap=option(int, "Resamples, for the share of each edge.", min=0),
    rounds=option(int | None, "Most iterations of ICD. Default: until it ends.", min=1),
    random_state=option(int, "Seed of the resamples.", name="--seed"),
)
def discover(
    table: Path,
    columns: str | None,
    discrete: str | None,
    tiers: str | None,
    forbid: Pairs,
    require: Pairs,
    output: Output,
    **options: Any,
) -> None:
    """Infer a causal graph over the columns of a table, allowing for hidden causes.

    Edges: a → b, a causes b; a o→ b, b does not cause a; a ↔ b, a hidden common cause; a o–o b, undetermined.
    """
    options |= {
        "discrete": discrete == "all" or (_names(discrete) if discrete else False),
        "tiers": [_names(tier) for tier in tiers.split(";")] if tiers else None,
        "forbidden": _pairs("--forbid", forbid),
        "required": _pairs("--require", require),
    }
    data = _chosen(load_table(table), columns)
    with output.watching() as progress:
        reading = find_graph(data, name=table.name, progress=progress, **options)
    output.deliver(reading)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _pairs(option: str, pairs: Pairs) -> list[tuple[str, str]]:
    causes_and_effects = []
    for pair in pairs or ():
        cause, arrow, effect = (part.strip() for part in pair.partition("->"))
        if not (cause and arrow and effect):
            raise ValueError(f"{option} takes a pair of columns such as 'age->bp', got {pair!r}")
        causes_and_effects.append((cause, effect))
    return causes_and_effects


def _chosen(table: Table, columns: str | None) -> Table:
    """The named columns of the table."""
    if columns is None:
        return table
    for name in (names := _names(columns)):
        check_choice("a column of --columns", name, table.columns)
    numbers = [table.columns.index(name) for name in dict.fromkeys(names)]
    parts = ("columns", "kinds", "values", "categories")
    chosen = {part: tuple(getattr(table, part)[number] for number in numbers) for part in parts}
    return replace(table, **chosen, target=None)
