"""GPTQ, AWQ, compressed-tensors and MLX: integers packed in words of 32 bits, with scales by group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from keyquery.checkpoints.formats.quantised.weight import Quantised, scales_of, unpack

BITS = (2, 3, 4, 8)  # of GPTQ
POSITION = [0, 4, 1, 5, 2, 6, 3, 7]  # where output j of eight lies in a word of AWQ


class Gptq(Quantised):
    """GPTQ: codes packed along the inputs, W[o, i] = (q[i, o] − z[g, o])·s[g, o] with g the group of input i.

    Files of the first format store z − 1; `checkpoint_format = "gptq_v2"` in the config says that z is stored itself.
    """

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
        """(q − z)·s; as its kernels do, z = 0 is stored as −1."""
        (outputs, inputs), bits = self.shape, self.bits
        count = self.require_matrix("scales")[0]
        self.require("scales", (count, outputs))
        self.require("zeros", (count, -(-outputs * bits // 32)))
        kind = self.settings.get("checkpoint_format") or "gptq"
        if kind not in ("gptq", "gptq_v2"):
            raise ValueError(f"{self.parts['codes']} is in the format {kind!r:.30}, expected gptq or gptq_v2")
        codes = unpack(self.words("codes").mT.contiguous(), bits, inputs)
        zeros = (unpack(self.words("zeros"), bits, outputs).int() + (kind == "gptq")) & (2**bits - 1)
        return _grouped(codes, zeros.mT, self.read("scales").float().mT, self._group(inputs, count))

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


class Awq(Quantised):
    """AWQ in its gemm layout: 4-bit codes packed along the outputs."""

    name = "AWQ"
    mark = ".qweight"
    roles: ClassVar[Mapping[str, str]] = {"codes": ".qweight", "scales": ".scales", "zeros": ".qzeros"}
    needed = ("codes", "scales", "zeros")

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""
        inputs, words = self.require_matrix("codes")
        return 8 * words, inputs

    @property
    def precision(self) -> str:
        """Such as "awq int4 in groups of 128"."""
        return f"awq int4 in groups of {self.shape[1] // max(self.require_matrix('scales')[0], 1)}"

    def values(self) -> Tensor:
        """(q − z)·s."""
        version, bits = self.settings.get("version", "gemm"), self.settings.get("bits", 4)
        if str(version).lower() != "gemm" or bits != 4:
            raise ValueError(
                f"{self.parts['codes']}: AWQ {version!r:.20} of {bits!r:.20} bits, expected gemm of 4 bits"
            )
        outputs, inputs = self.shape
        count = self.require_matrix("scales")[0]
        self.require("scales", (count, outputs))
        self.require("zeros", (count, outputs // 8))
        group = torch.arange(inputs) // self.group_size("scales", count, inputs)
        codes, zeros = (
            unpack(self.words(role), 4, outputs).unflatten(1, (-1, 8))[..., POSITION].flatten(1).mT
            for role in ("codes", "zeros")
        )
        return _grouped(codes, zeros, self.read("scales").float().mT, group)


class PackedIntegers(Quantised):
    """compressed-tensors' pack-quantized: codes lie 2^(bits − 1) above their integers; zeros are packed along rows."""

    name = "compressed-tensors' packed integers"
    mark = ".weight_packed"
    roles: ClassVar[Mapping[str, str]] = {
        "codes": ".weight_packed",
        "scales": ".weight_scale",
        "shape": ".weight_shape",
        "zeros": ".weight_zero_point",
        "groups": ".weight_g_idx",
    }
    needed = ("codes", "scales", "shape")

    @classmethod
    def fits(cls, module: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Only packed integers state the shape of the weight; packed floats need none."""
        return f"{module}.weight_shape" in shapes

    @property
    def shape(self) -> tuple[int, ...]:
        """What the file states, checked against the codes."""
        self.require("shape", (2,))
        rows, columns = (int(size) for size in self.read("shape").tolist())
        packed = self.require_matrix("codes")
        if packed[0] != rows or not 0 < columns <= 32 * packed[1]:
            raise ValueError(
                f"{self.parts['shape']} states {(rows, columns)}, which does not fit {self.parts['codes']}, {packed}"
            )
        return rows, columns

    @property
    def bits(self) -> int:
        """Bits of a code: so many as fill the words."""
        words, columns = self.require_matrix("codes")[1], self.shape[1]
        fitting = [bits for bits in range(1, 9) if -(-columns * bits // 32) == words]
        if 4 in fitting or 8 in fitting:
            return 4 if 4 in fitting else 8
        if len(fitting) != 1:
            raise ValueError(f"{self.parts['codes']} has {words} words for {columns} columns, which is no whole code")
        return fitting[0]

    @property
    def precision(self) -> str:
        """Such as "int4 in groups of 128"."""
        groups, columns = self.require_matrix("scales")[1], self.shape[1]
        return f"int{self.bits} " + ("per row" if groups == 1 else f"in groups of {columns // groups}")

    def values(self) -> Tensor:
        """(code − 2^(bits − 1) − z)·s; each column has its group."""
        (rows, columns), bits = self.shape, self.bits
        groups = self.require_matrix("scales")[1]
        size = self.group_size("scales", groups, columns)
        self.require("scales", (rows, groups))
        codes = unpack(self.words("codes"), bits, columns).float() - 2 ** (bits - 1)
        zeros = self._zeros(rows, groups, bits) if "zeros" in self.parts else None
        return _grouped(codes, zeros, scales_of(self.read("scales")), self._group(columns, groups, size))

    def _zeros(self, rows: int, groups: int, bits: int) -> Tensor:
        zeros = self.read("zeros")
        if zeros.dtype == torch.int32:
            self.require("zeros", (-(-rows * bits // 32), groups))
            return unpack(zeros.mT.contiguous(), bits, rows).mT.float() - 2 ** (bits - 1)
        self.require("zeros", (rows, groups))
        return zeros.float()

    def _group(self, columns: int, groups: int, size: int) -> Tensor:
        if "groups" in self.parts:
            self.require("groups", (columns,))
            order = self.read("groups").long()
            if bool((order >= 0).all()):  # −1 where columns are in order
                if int(order.max()) >= groups:
                    raise ValueError(f"{self.parts['groups']} names group {int(order.max())}; there are {groups}")
                return order
        return torch.arange(columns) // size


def _grouped(codes: Tensor, zeros: Tensor | None, scales: Tensor, group: Tensor) -> Tensor:
    """(q − z)·s of codes (out, in), with zeros and scales (out, groups) and the group of each input."""
    values = codes.float() if zeros is None else codes.float() - zeros.float()[:, group]
    return values.mul_(scales[:, group])


class Mlx(Quantised):
    """MLX: codes packed along the inputs, W[o, i] = s[o, g]·q[o, i] + b[o, g] with g the group of input i."""

    name = "MLX"
    mark = ".biases"
    roles: ClassVar[Mapping[str, str]] = {"codes": ".weight", "scales": ".scales", "biases": ".biases"}
    needed = ("codes", "scales")

    @classmethod
    def fits(cls, module: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """A scale beside every bias."""
        return shapes.get(f"{module}.scales") == shapes[f"{module}.biases"] and f"{module}.weight" in shapes

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""
        stated = self.settings.get(self.module, self.settings)  # modules may differ
        size = stated.get("group_size", 64) if isinstance(stated, Mapping) else 64
        return self.require_matrix("codes")[0], self.require_matrix("scales")[1] * int(size)

    @property
    def bits(self) -> int:
        """As many as the words have for each input."""
        words, inputs = self.require_matrix("codes")[1], self.shape[1]
        if not inputs or 32 * words % inputs or not 2 <= 32 * words // inputs <= 8:
            raise ValueError(f"{self.parts['codes']}: {words} words are not codes of 2 to 8 bits for {inputs} inputs")
        return 32 * words // inputs

    @property
    def precision(self) -> str:
        """Such as "mlx int4 in groups of 64"."""
        return f"mlx int{self.bits} in groups of {self.shape[1] // max(self.require_matrix('scales')[1], 1)}"

    def values(self) -> Tensor:
        """The weight in float32."""
        outputs, inputs = self.shape
        self.require("scales", (outputs, self.shape_of("scales")[1]))
        codes = self.read("codes")
        self.require_kind("codes", codes, torch.uint32, torch.int32)
        groups = unpack(codes.view(torch.int32), self.bits, inputs).reshape(outputs, self.shape_of("scales")[1], -1)
        scales, biases = (self.read(role).float().unsqueeze(-1) for role in ("scales", "biases"))
        return (groups * scales + biases).flatten(1)
