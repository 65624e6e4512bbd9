"""TensorBoard logging of all training runs of the process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from keyquery.support.extras import optional

VARIABLE = "KEYQUERY_TENSORBOARD"  # a folder; the switch for studies and estimators, which have no such option
_numbers = count()


class Board:
    """The curves of one run, in its own folder. Needs the extra `board`."""

    def __init__(self, folder: str | Path, name: str, first: int = 0) -> None:
        """`first` is the step that training resumes from; later steps of an earlier run are purged."""
        library = optional("torch.utils.tensorboard", "a log for TensorBoard")
        self._writer: Any = library.SummaryWriter(str(Path(folder) / name), purge_step=first + 1 if first else None)

    def tell(self, row: Mapping[str, float], lr: float | None = None) -> None:
        """One row of the log, and the learning rate if given."""
        for name, value in (row if lr is None else {**row, "lr": lr}).items():
            if name != "step":
                self._writer.add_scalar(name, value, int(row["step"]))
        self._writer.flush()

    def close(self) -> None:
        """Close the log."""
        self._writer.close()


def open_board(folder: str | Path | None, checkpoint: Path | None, seed: int, rank: int, first: int) -> Board | None:
    """The board of a run: in `folder`, or in that of the environment variable; None if neither is set.

    A run with a checkpoint is named after it, so that a resumed run continues its curves; others are numbered, by
    process.
    """
    parent = folder or os.environ.get(VARIABLE)
    if not parent or rank > 0:
        return None
    name = checkpoint.stem if checkpoint is not None else f"{os.getpid()}-{next(_numbers)}-seed{seed}"
    return Board(parent, name, first)
