"""`keyquery discover`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import STR, Output, default_of, writes
from keyquery.learn.data.tables import Table, load_table
from keyquery.learn.discover.discover import TESTS
from keyquery.learn.discover.discover import discover as find_graph
from keyquery.learn.discovery.search import METHODS
from keyquery.support.checks import check_choice

Pairs = list[str] | None


@writes("json", "csv", "html", "picture")
def discover(
    table: Annotated[Path, typer.Argument(help="A delimited text file, such as TABLE.csv; rows are samples.")],
    columns: Annotated[str | None, typer.Option(help="Columns to use, such as age,bmi,bp. Default: all.")] = None,
    test: Annotated[str, typer.Option(help=f"Test of independence: {', '.join(TESTS)}.")] = default_of(
        find_graph, "test"
    ),
    alpha: Annotated[float, typer.Option(help="Significance level of the tests.")] = default_of(find_graph, "alpha"),
    method: Annotated[str, typer.Option(help=f"Causal discovery algorithm: {' or '.join(METHODS)}.")] = default_of(
        find_graph, "method"
    ),
    discrete: Annotated[
        str | None, typer.Option(help="Numeric columns that are categories, such as sex,stage, or all. Default: none.")
    ] = None,
    tiers: Annotated[
        str | None, typer.Option(help="Order in time, such as 'age,sex;bmi;bp': no later column causes an earlier one.")
    ] = None,
    forbid: Annotated[
        Pairs, typer.Option(metavar=STR, help="'bp->age': the first does not cause the second; repeatable.")
    ] = None,
    require: Annotated[Pairs, typer.Option(metavar=STR, help="'age->bp': this edge is given; repeatable.")] = None,
    lags: Annotated[
        int, typer.Option(min=0, help="Rows are in order of time: also use each column at so many rows before.")
    ] = default_of(find_graph, "lags"),
    selection: Annotated[bool, typer.Option("--selection", help="Allow for selection bias.")] = False,
    bootstrap: Annotated[int, typer.Option(min=0, help="Resamples, for the share of each edge.")] = default_of(
        find_graph, "bootstrap"
    ),
    rounds: Annotated[int | None, typer.Option(min=1, help="Most iterations of ICD. Default: until it ends.")] = None,
    random_state: Annotated[int, typer.Option("--seed", help="Seed of the resamples.")] = default_of(
        find_graph, "random_state"
    ),
    *,
    output: Output,
) -> None:
    """Infer a causal graph over the columns of a table, allowing for hidden causes.

    Edges: a → b, a causes b; a o→ b, b does not cause a; a ↔ b, a hidden common cause; a o–o b, undetermined.
    """
    data = _chosen(load_table(table), columns)
    with output.watching() as progress:
        reading = find_graph(
            data,
            test,
            alpha,
            method,
            discrete=discrete == "all" or (_names(discrete) if discrete else False),
            tiers=[_names(tier) for tier in tiers.split(";")] if tiers else None,
            forbidden=_pairs("--forbid", forbid),
            required=_pairs("--require", require),
            lags=lags,
            selection=selection,
            bootstrap=bootstrap,
            rounds=rounds,
            random_state=random_state,
            name=table.name,
            progress=progress,
        )
    output.deliver(reading)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _pairs(option: str, pairs: Pairs) -> list[tuple[str, str]]:
    found = []
    for pair in pairs or ():
        cause, arrow, effect = (part.strip() for part in pair.partition("->"))
        if not (cause and arrow and effect):
            raise ValueError(f"{option} takes a pair of columns such as 'age->bp', got {pair!r}")
        found.append((cause, effect))
    return found


def _chosen(table: Table, columns: str | None) -> Table:
    """The named columns of the table."""
    if columns is None:
        return table
    for name in (names := _names(columns)):
        check_choice("a column of --columns", name, table.columns)
    places = [table.columns.index(name) for name in dict.fromkeys(names)]
    parts = {part: tuple(getattr(table, part)[place] for place in places) for part in ("columns", "kinds", "values")}
    return replace(table, **parts, categories=tuple(table.categories[place] for place in places), target=None)
