"""Where the same points were at many steps, on disk: 16 bits a number, however long training takes."""

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
    """The places of n points at every recorded step.

    Start and latest place are kept as they are, float32, and lengths of ways are summed up as points come in. What lies
    between is written to a file without a name, as float16 differences from the start in units of the largest one: each
    is known to three digits of how far its point has gone. The file is gone when the store is.

    >>> store = Store(torch.zeros(2, 3))
    >>> store.add(1, torch.ones(2, 3)); store.add(2, torch.zeros(2, 3))
    >>> store.place(1)[0], store.gone(2)
    (tensor([1., 1., 1.], dtype=torch.float64), tensor([3.4641, 3.4641], dtype=torch.float64))
    """

    def __init__(self, start: Float[Tensor, "n d"], folder: str | Path | None = None, device: Any = "cpu") -> None:
        """`folder` is where the file lies, `device` where places are handed out."""
        self.start = self.last = start.float()
        self.device = device
        self.steps = [0]
        self.count, width = start.shape
        self._scales: list[float] = []
        self._gone = torch.zeros(self.count, dtype=torch.float64)
        self._record = np.dtype([("moved", "<f2", (self.count, width)), ("gone", "<f8", (self.count,))])
        if folder is not None and not Path(folder).is_dir():
            raise NotADirectoryError(f"folder must be one that is there, and {folder} is none")
        # Closed with the store.
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._close = weakref.finalize(self, self._file.close)

    def add(self, step: int, place: Float[Tensor, "n d"]) -> None:
        """The points at one more step."""
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
        """Where the points were at a record, float64; 0 is the start."""
        if record == 0:
            return self.start.to(self.device).double()
        if record == len(self.steps) - 1:
            return self.last.to(self.device).double()
        moved = torch.from_numpy(self._read("moved", record).astype(np.float64))
        return (self.start.double() + moved * self._scales[record - 1]).to(self.device)

    def gone(self, record: int) -> Float[Tensor, " n"]:
        """How long each point's way up to a record was, float64."""
        if record == 0:
            return torch.zeros_like(self._gone, device=self.device)
        return torch.from_numpy(np.array(self._read("gone", record))).to(self.device)

    def _read(self, field: str, record: int) -> np.ndarray:
        return np.memmap(self._file, self._record, mode="r", shape=(len(self._scales),))[field][record - 1]
