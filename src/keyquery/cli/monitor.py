"""`keyquery monitor`."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from pathlib import Path

import typer

from keyquery.cli.options import Output, argument, command, option
from keyquery.instruments.monitor.records import FILE, read_records, reading_of


@command(
    *("json", "csv", "html", "picture"),
    run=argument(Path, "The folder that a kq.Monitor writes to, or its monitor.jsonl."),
    follow=option(bool, "Keep watching, and print records and alarms as they are written.", False, name="--follow -f"),
    seconds=option(float, "With --follow: seconds between checks.", 5.0, min=0.1),
)
def monitor(run: Path, follow: bool, seconds: float, output: Output) -> None:
    """Watch a training run: attention logits of every head, and alarms.

    The run records itself with `kq.Monitor(model, folder=RUN)`. --json, --csv, --html and --picture hold the records so
    far; with --follow they are not updated.

    Examples: `keyquery monitor runs/a --html monitor.html` · `keyquery monitor runs/a --follow`
    """
    path = run if run.is_file() or run.suffix == ".jsonl" else run / FILE
    if not follow:
        _show(path, output)
        return
    with suppress(KeyboardInterrupt):
        if not path.exists():
            typer.echo(f"waiting for {path}", err=True)
        while not (path.exists() and read_records(path)["records"]):
            time.sleep(seconds)
        known = _show(path, output)
        while True:
            time.sleep(seconds)
            records = read_records(path)["records"]
            for record in records[known:]:
                logits = [value for value in record["values"].get("largest", []) if value is not None]
                typer.echo(f"step {record['step']}: largest logit {max(logits, default=math.nan):.4g}")
                for alarm in record["alarms"]:
                    typer.echo(f"step {alarm['step']}: {alarm['reason']}")
            known = len(records)  # fewer than before if the run was restarted


def _show(path: Path, output: Output) -> int:
    """Print and write the records so far; returns how many there are."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: no kq.Monitor(…, folder=…) has recorded there yet")
    state = read_records(path)
    output.deliver(reading_of(state, {"file": path.name, "every": state["every"]}))
    return len(state["records"])
