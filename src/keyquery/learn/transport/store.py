"""Positions of the same points at many steps, stored on disk in 16 bits per number."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


class Store:
    """The positions of n points at every recorded step.

    The first and latest positions are kept in float32, and path lengths are accumulated in float64. Steps in between
    are written to an anonymous temporary file as float16 differences from the start, scaled by the largest one: about
    three significant digits of the displacement. The file is deleted with the store.
    """

    def __init__(self, start: Float[Tensor, "n d"], folder: str | Path | None = None, device: Any = "cpu") -> None:
        """`folder` is where the file is created, `device` where positions are returned."""
        self.start = self.last = start.float()
        self.device = device
        self.steps = [0]
        self.count, width = start.shape
        self._scales: list[float] = []
        self._gone = torch.zeros(self.count, dtype=torch.float64)
        self._record = np.dtype([("moved", "<f2", (self.count, width)), ("gone", "<f8", (self.count,))])
        if folder is not None and not Path(folder).is_dir():
            raise NotADirectoryError(f"folder must be an existing folder, and {folder} is not")
        # Closed with the store.
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._close = weakref.finalize(self, self._file.close)

    def add(self, step: int, place: Float[Tensor, "n d"]) -> None:
        """Add the points at a further step."""
        place = place.float()
        moved = place - self.start
        scale = float(moved.abs().max()) or 1.0
        self._gone += (place.double() - self.last.double()).norm(dim=-1)
        record = np.empty((), self._record)
        record["moved"], record["gone"] = (moved / scale).half().numpy(), self._gone.numpy()
        self._file.seek(0, 2)
        self._file.write(record.tobytes())
        self._file.flush()
        self._scales.append(scale)
        self.steps.append(step)
        self.last = place

    def place(self, record: int) -> Float[Tensor, "n d"]:
        """Positions of the points at a record, float64; 0 is the start."""
        if record == 0:
            return self.start.to(self.device).double()
        if record == len(self.steps) - 1:
            return self.last.to(self.device).double()
        moved = torch.from_numpy(self._read("moved", record).astype(np.float64))
        return (self.start.double() + moved * self._scales[record - 1]).to(self.device)

    def gone(self, record: int) -> Float[Tensor, " n"]:
        """Path length of each point up to a record, float64."""
        if record == 0:
            return torch.zeros_like(self._gone, device=self.device)
        return torch.from_numpy(np.array(self._read("gone", record))).to(self.device)

    def _read(self, field: str, record: int) -> np.ndarray:
        return np.memmap(self._file, self._record, mode="r", shape=(len(self._scales),))[field][record - 1]
