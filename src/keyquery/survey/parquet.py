"""Every head of a survey as one Parquet file, sorted by model, layer and head."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from keyquery.instruments.look.reading import Look
from keyquery.support.extras import optional
from keyquery.support.files import writing

MODEL = {"model": "string", "run": "string", "step": "int64", "family": "string", "model_type": "string"}
MODEL |= {"parameters": "int64", "layers": "int32", "width": "int32"}
METRICS = (
    *("symmetry", "column_directionality", "column_directionality_norms", "symmetric_energy", "skew_energy"),
    *("positive_share", "effective_rank", "stable_rank"),
)
HEAD = {"layer": "int32", "head": "int32", "name": "string", "kind": "string", "scale": "float64", "rank": "int32"}
HEAD |= {"causal": "bool_"} | {f"{view}_{name}": "float64" for view in ("raw", "folded") for name in METRICS}
HEAD |= dict.fromkeys(("label", "evidence", "properties"), "string")
GROUP = 65_536  # rows per row group: many small models share one


def arrow(part: str = "pyarrow") -> Any:
    """Import pyarrow; if it is missing, the error names the extra to install."""
    return optional(part, "a survey")


def columns_of(look: Look) -> dict[str, list[Any]]:
    """The heads of a look as columns: its records, and whether their layer is causal."""
    causal = {row["layer"]: row["causal"] for row in look.layers}
    rows = [{**row, "causal": causal[row["layer"]]} for row in look.records()]
    return {name: [row[name] for row in rows] for name in HEAD}


def write_rows(path: Path, models: Iterable[tuple[dict[str, Any], dict[str, list[Any]]]], mark: str = "") -> None:
    """Write the heads of all models to a Parquet file."""
    pa, parquet = arrow(), arrow("pyarrow.parquet")
    schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in (MODEL | HEAD).items()])
    with writing(path, mark) as temporary, parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        group: list[Any] = []
        rows = 0
        for facts, heads in models:
            count = len(heads["layer"])
            group.append(pa.table({name: [facts[name]] * count for name in MODEL} | heads, schema=schema))
            rows += count
            if rows >= GROUP:
                writer.write_table(pa.concat_tables(group).combine_chunks(), row_group_size=GROUP)
                group, rows = [], 0
        if group:
            writer.write_table(pa.concat_tables(group).combine_chunks(), row_group_size=GROUP)
