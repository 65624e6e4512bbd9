"""`keyquery monitor`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import Output, writes
from keyquery.instruments.monitor.records import FILE, read_records, reading_of


@writes("json", "csv", "html", "picture")
def monitor(
    run: Annotated[Path, typer.Argument(help="The folder that a kq.Monitor writes to, or its monitor.jsonl.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep watching, and print alarms as they are written.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="With --follow: seconds between two looks.")] = 5.0,
    *,
    output: Output,
) -> None:
    """Watch a training that runs under `kq.Monitor(model, folder=RUN)`: attention logits of every head, and alarms.

    Examples: `keyquery monitor runs/a --html monitor.html` · `keyquery monitor runs/a --follow`
    """
    path = run / FILE if run.is_dir() else run
    if not path.exists():
        raise FileNotFoundError(f"{run} has no {FILE}: no kq.Monitor(…, folder=…) has recorded there yet")
    state = read_records(path)
    output.deliver(reading_of(state, {"file": path.name, "every": state["every"]}))
    known = len(state["records"])
    try:
        while follow:
            time.sleep(seconds)
            records = read_records(path)["records"]
            for record in records[known:]:
                typer.echo(f"step {record['step']}: largest logit {_largest(record):.4g}")
                for alarm in record["alarms"]:
                    typer.echo(f"step {alarm['step']}: {alarm['reason']}")
            known = len(records)
    except KeyboardInterrupt:
        return


def _largest(record: dict[str, dict[str, list[float | None]]]) -> float:
    return max((value for value in record["values"].get("largest", []) if value is not None), default=float("nan"))
