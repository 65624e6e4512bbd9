"""`keyquery monitor`."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from keyquery.cli.options import Output, writes
from keyquery.instruments.monitor.records import FILE, read_records, reading_of


@writes("json", "csv", "html", "picture")
def monitor(
    run: Annotated[Path, typer.Argument(help="The folder that a kq.Monitor writes to, or its monitor.jsonl.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep watching, and print records and alarms as they are written.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="With --follow: seconds between checks.")] = 5.0,
    *,
    output: Output,
) -> None:
    """Watch a training that runs under `kq.Monitor(model, folder=RUN)`: attention logits of every head, and alarms.

    Files are written once, from the records so far.

    Examples: `keyquery monitor runs/a --html monitor.html` · `keyquery monitor runs/a --follow`
    """
    path = run if run.suffix == ".jsonl" else run / FILE
    if follow and not path.exists():
        typer.echo(f"waiting for {path}", err=True)
        _wait_for(path, seconds)
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
            known = len(records)  # fewer than before if the run was begun anew
    except KeyboardInterrupt:
        return


def _wait_for(path: Path, seconds: float) -> None:
    """Until a file has its first record, or an interrupt."""
    with suppress(KeyboardInterrupt):
        while not (path.exists() and len(path.read_text(encoding="utf-8").splitlines()) > 1):
            time.sleep(seconds)


def _largest(record: dict[str, dict[str, list[float | None]]]) -> float:
    return max((value for value in record["values"].get("largest", []) if value is not None), default=float("nan"))
