"""GPTQ: codes packed along the inputs, W[o, i] = (q[i, o] − z[g, o])·s[g, o] with g the group of input i.

Files of the first format store z − 1; `checkpoint_format = "gptq_v2"` in the config says that z is stored itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from keyquery.checkpoints.formats.quantised.weight import Quantised, unpack

BITS = (2, 3, 4, 8)


class Gptq(Quantised):
    """A weight of GPTQ."""

    name = "GPTQ"
    mark = ".qweight"
    roles: ClassVar[Mapping[str, str]] = {
        "codes": ".qweight",
        "scales": ".scales",
        "zeros": ".qzeros",
        "groups": ".g_idx",
    }
    needed = ("codes", "scales", "zeros")

    @classmethod
    def fits(cls, module: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """A column of codes per output."""
        return shapes[f"{module}.qweight"][-1:] == shapes.get(f"{module}.scales", (0,))[-1:]

    @property
    def bits(self) -> int:
        """As the config says, else as the length of the group index has it."""
        stated = self.settings.get("bits", self.settings.get("w_bit"))
        if stated is None and "groups" in self.parts:
            stated = 32 * self.require_matrix("codes")[0] / max(self.shape_of("groups")[0], 1)
        if stated not in BITS:
            raise ValueError(
                f"{self.parts['codes']}: the config must state the bits of its codes, {', '.join(map(str, BITS))}; "
                f"got {stated!r:.20}"
            )
        return int(stated)

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""
        words, outputs = self.require_matrix("codes")
        return outputs, 32 * words // self.bits

    @property
    def precision(self) -> str:
        """Such as "gptq int4 in groups of 128"."""
        return f"gptq int{self.bits} in groups of {self.shape[1] // max(self.require_matrix('scales')[0], 1)}"

    def values(self) -> Tensor:
        """(q − z)·s."""
        (outputs, inputs), bits = self.shape, self.bits
        count = self.require_matrix("scales")[0]
        self.require("scales", (count, outputs))
        self.require("zeros", (count, -(-outputs * bits // 32)))
        codes, zeros, scales = self.read("codes"), self.read("zeros"), self.read("scales").float()
        for role, tensor in (("codes", codes), ("zeros", zeros)):
            self.require_kind(role, tensor, torch.int32)
        group, offset = self._group(inputs, count), self._offset()
        zero = (unpack(zeros, bits, outputs).int() + offset) & (2**bits - 1)  # as its kernels do: z = 0 is stored as −1
        values = unpack(codes.mT.contiguous(), bits, inputs).float()
        return values.sub_(zero.float()[group].mT).mul_(scales[group].mT)

    def _offset(self) -> int:
        kind = self.settings.get("checkpoint_format") or "gptq"
        if kind not in ("gptq", "gptq_v2"):
            raise ValueError(f"{self.parts['codes']} is in the format {kind!r:.30}, expected gptq or gptq_v2")
        return 1 if kind == "gptq" else 0

    def _group(self, inputs: int, count: int) -> Tensor:
        """The group of each input."""
        if "groups" in self.parts:
            self.require("groups", (inputs,))
            group = self.read("groups").long()
        else:
            size = self.settings.get("group_size")
            size = size if isinstance(size, int) and size > 0 else -(-inputs // max(count, 1))
            group = torch.arange(inputs) // size
        if not 0 <= int(group.min()) <= int(group.max()) < count:
            raise ValueError(
                f"{self.parts['scales']} has {count} groups, and the inputs are of groups {int(group.min())} to "
                f"{int(group.max())}"
            )
        return group
