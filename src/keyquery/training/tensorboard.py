"""Curves for TensorBoard, of every training of this process, where they were asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from keyquery.support.extras import optional

VARIABLE = "KEYQUERY_TENSORBOARD"  # a folder: the way to ask of studies and estimators, which take no such option
_numbers = count()


class Board:
    """The curves of one training, in a folder of their own. Needs the extra `board`."""

    def __init__(self, folder: str | Path, name: str, first: int = 0) -> None:
        """`first` is the step that training goes on from: what an earlier run told of later ones is forgotten."""
        library = optional("torch.utils.tensorboard", "a log for TensorBoard")
        self._writer: Any = library.SummaryWriter(str(Path(folder) / name), purge_step=first + 1 if first else None)

    def tell(self, row: Mapping[str, float], lr: float) -> None:
        """One row of the log, and the learning rate."""
        for name, value in {**row, "lr": lr}.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(row["step"]))
        self._writer.flush()

    def close(self) -> None:
        """Nothing more is told."""
        self._writer.close()


def open_board(folder: str | Path | None, checkpoint: Path | None, seed: int, rank: int, first: int) -> Board | None:
    """The board of a training: in `folder`, or in the one that the environment names; None where neither does.

    A training that has a checkpoint is called as that is, so that one which is resumed goes on with its curves; others
    are numbered, by process.
    """
    asked = folder or os.environ.get(VARIABLE)
    if not asked or rank > 0:
        return None
    name = checkpoint.stem if checkpoint is not None else f"{os.getpid()}-{next(_numbers)}-seed{seed}"
    return Board(asked, name, first)
