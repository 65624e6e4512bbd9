"""Compile every Triton kernel for Hopper GPUs, without one: `python -m tests.hopper`, in a process of its own.

The interpreter that tests use elsewhere accepts what the compiler refuses. Here each launch on CPU tensors compiles its
kernel down to machine code for compute capability 9.0 and runs nothing, so results are whatever memory held.
"""

import os

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

if __name__ == "__main__":  # not where tests are collected
    triton.knobs.runtime.interpret = False  # kernels are compiled,
    os.environ["TRITON_INTERPRET"] = "1"  # and CPU tensors are taken all the same

import keyquery as kq
from keyquery.forms.eigenvalues_gpu import eigenvalues
from keyquery.intervene.dial.widen import HalfTurn
from keyquery.intervene.dial.widen_triton import widen

TYPES = {
    **{torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"},
    **{torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.int8: "i8", torch.bool: "i1"},
}
SHORT = (torch.float32, torch.bfloat16, torch.float16)
compiled: dict[str, int] = {}


def compile_only(self, *args, grid, warmup, **options):
    """In place of a launch."""
    values = dict(zip(self.arg_names, args, strict=False))
    values |= {name: options.pop(name) for name in self.arg_names if name in options}
    values |= {name: 0 for name in values if name == "STATIC"}  # a loop that only the interpreter needs
    constants = {param.name for param in self.params if param.is_constexpr}
    constants |= {name for name, value in values.items() if value is None or value is True or value is False}
    signature = {name: "constexpr" if name in constants else kind_of(value) for name, value in values.items()}
    fixed = {(self.arg_names.index(name),): values[name] for name in constants}
    binary = triton.compile(ASTSource(self, signature, fixed), GPUTarget("cuda", 90, 32), options)
    assert binary.asm["cubin"]
    compiled[self.__name__] = compiled.get(self.__name__, 0) + 1


def kind_of(value):
    """Triton's name of an argument's type."""
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def primal(dtype):
    """The kernel of a layer, forward and backward, with and without padding."""
    layer = kq.PrimalAttention(32, 2, rank=8, impl="triton", dtype=dtype)
    for mask in (None, torch.ones(2, 64, dtype=torch.bool)):
        x = torch.randn(2, 64, 32, dtype=dtype, requires_grad=True)
        out = layer(x, mask=mask)
        (out.float().sum() + kq.regularizer(layer)).backward()


def dialled(dtype):
    """Queries and keys of dialled attention."""
    parts = torch.randn(4, 2, 2, 45, 24, dtype=dtype)
    angles = kq.Rope(24).angles(torch.arange(45.0)[None])
    turn = HalfTurn(angles.cos().float(), angles.sin().float(), 0, False)
    widen(*parts, torch.rand(5, 2, dtype=torch.float64), 45, True, True, turn)


def main():
    """Compile them all, and say how many variants of each there are."""
    JITFunction.run = compile_only
    for dtype in SHORT:
        primal(dtype)
        dialled(dtype)
    eigenvalues(torch.eye(20, dtype=torch.float64).repeat(2, 1, 1))
    for name, count in compiled.items():
        print(f"{name.rpartition('.')[2]}: {count}")


if __name__ == "__main__":
    main()
