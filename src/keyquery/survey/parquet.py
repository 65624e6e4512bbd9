"""Every head of a survey as one Parquet file, sorted by model, layer and head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from keyquery.support.extras import optional
from keyquery.support.files import writing
from keyquery.survey.worker import FIGURES, PLACE, VIEWS

MODEL = {"model": "string", "run": "string", "step": "int64", "family": "string", "model_type": "string"}
MODEL |= {"parameters": "int64", "layers": "int32", "width": "int32"}
KINDS = {"layer": "int32", "head": "int32", "name": "string", "kind": "string", "scale": "float64", "rank": "int32"}
HEAD = {name: KINDS[name] for name in PLACE} | {"causal": "bool_"}
HEAD |= {f"{view}_{name}": "float64" for view in VIEWS for name in FIGURES}
HEAD |= dict.fromkeys(("label", "evidence", "properties"), "string")
GROUP = 65_536  # rows per row group: many small models share one


def arrow(part: str = "pyarrow") -> Any:
    """Import pyarrow; if it is missing, the error names the extra to install."""
    return optional(part, "a survey")


def write_rows(path: Path, models: Iterable[tuple[Mapping[str, Any], Mapping[str, list[Any]]]], mark: str = "") -> int:
    """Write the heads of all models to a Parquet file, and return the number of rows."""
    pa, parquet = arrow(), arrow("pyarrow.parquet")
    schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in (MODEL | HEAD).items()])
    count = 0
    with writing(path, mark) as temporary, parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for tables in _groups(pa, schema, models):
            table = pa.concat_tables(tables).combine_chunks()
            writer.write_table(table, row_group_size=GROUP)
            count += len(table)
    return count


def _groups(
    pa: Any, schema: Any, models: Iterable[tuple[Mapping[str, Any], Mapping[str, list[Any]]]]
) -> Iterator[list[Any]]:
    tables: list[Any] = []
    rows = 0
    for facts, heads in models:
        count = len(heads["layer"])
        columns = {name: [facts[name]] * count for name in MODEL} | {name: heads[name] for name in HEAD}
        tables.append(pa.table(columns, schema=schema))
        rows += count
        if rows >= GROUP:
            yield tables
            tables, rows = [], 0
    if tables:
        yield tables
