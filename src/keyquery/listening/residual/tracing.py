"""Follow the residual stream of a running model: every tensor that is a sum of writes carries its expression.

Torch functions are watched, so that any arrangement of blocks is followed: pre- and post-norm, parallel blocks, norms
after attention, multipliers. Attention and MLPs end an expression: what they add to the stream is a new write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints import Layer
from keyquery.checkpoints.heads import EMBEDDINGS
from keyquery.listening.attachment import add_listener
from keyquery.listening.call import Call
from keyquery.listening.exclusive import temporarily
from keyquery.listening.hooks import entry
from keyquery.listening.products import ModuleMode
from keyquery.listening.residual import operations as ops
from keyquery.listening.residual.terms import BIAS, HeadWrites, Term, Write, added

INPUT = "input embedding"
FUSED = "scaled_dot_product_attention"
# What a tensor of a run carries: its expression, the module that it left, and whether it is attention weights, or their
# product with values, of which layer.
TERM, MODULE, WEIGHTS, CONTEXT = "_kq_term", "_kq_module", "_kq_weights", "_kq_context"


@dataclass(eq=False)
class Attended:
    """The attention call of one layer, with the expression of its values."""

    call: Call
    term: Term | None

    @cached_property
    def weights(self) -> Float[Tensor, "batch heads n m"]:
        """Its attention weights."""
        return self.call.weights().detach()


@dataclass(eq=False)
class Entered:
    """What entered a module, with its expression, and that of the input of its block."""

    tokens: Tensor
    term: Term | None
    block: Term | None
    calls: int = 1


class Trace(ModuleMode):
    """Watches torch functions; `layers` are the attention layers of the model, whose heads are told apart."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self._attention = {module_of(layer): (stem_of(layer), layer.heads) for layer in layers}
        own = [layer for layer in layers if layer.kind == "self"]
        self._watched = {entry(layer) for layer in own}
        self._depth = _block_depth(sorted({module_of(layer) for layer in own}))
        self._blocks = {self._block(module_of(layer)) or "": stem_of(layer) for layer in own}
        self._thread = get_ident()
        self.clear()

    def clear(self) -> None:
        """Forget a run."""
        self.stack.clear()
        self.attended: dict[str, Attended] = {}
        self.entered: dict[str, Entered] = {}
        self._writers: dict[str, str] = {}
        self._inputs: dict[str, Term | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        followed = get_ident() == self._thread and bool(self.stack)
        before = _before(args) if followed and _in_place(name) else args
        out = func(*args, **kwargs)
        if followed:
            self._follow(name, func, before, kwargs, out)
        return out

    def _follow(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if name == "embedding":
            tag(out, TERM, Write(self._source(out), out.detach().clone()))
            return
        self._attend(name, args, kwargs, out)
        first = next((value for value in args if isinstance(value, Tensor)), None)
        if isinstance(out, Tensor) and out is not first:
            term = self._term(name, func, args, kwargs, out)
            if term is not None or hasattr(out, TERM):
                tag(out, TERM, term)
        elif isinstance(out, (tuple, list)) and name in ops.LINEAR and first is not None:
            whole: Any = term_of(first)
            for index, each in enumerate(out if whole is not None else ()):
                tag(each, TERM, ops.mapped(whole, first, partial(_nth, func, args[1:], kwargs, index)))

    def _term(self, name: str, func: Any, args: Any, kwargs: Any, out: Tensor) -> Term | None:
        """The expression of a result; None where it is not linear in any write."""
        if (heads := self._head_writes(name, args, kwargs, out)) is not None:
            return heads
        a: Any = args[0] if args else None
        b: Any = args[1] if len(args) > 1 else kwargs.get("other")
        left: Any = term_of(a)
        right: Any = term_of(b)
        if name == "addmm" and right is not None and self._projects():
            return ops.projected(right, b, args[2].mT, a, out)
        if left is None and (right is None or name not in ops.ADD | ops.SUBTRACT | ops.MULTIPLY):
            return None
        if name in ops.ADD | ops.SUBTRACT and "alpha" not in kwargs:
            return self._sum(a, b, name in ops.SUBTRACT, out)
        if name in ops.MULTIPLY | ops.DIVIDE and (left is None or right is None):
            own, like, factor = (right, b, a) if left is None else (left, a, b)
            return ops.scaled(own, like, factor, name in ops.DIVIDE)
        if name in ("layer_norm", "rms_norm"):
            return ops.normed(left, a, out, name == "layer_norm", *args[1:], **kwargs)
        if name == "linear" and self._projects():
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return ops.projected(left, a, args[1], bias, out)
        if name in ops.PRODUCTS and isinstance(b, Tensor) and b.ndim == 2 and right is None and self._projects():
            return ops.projected(left, a, b.mT, None, out)
        return ops.mapped(left, a, lambda x: func(x, *args[1:], **kwargs)) if name in ops.LINEAR else None

    def _sum(self, a: Any, b: Any, minus: bool, out: Tensor) -> Term | None:
        terms = []
        for value in (a, b):
            term = term_of(value)
            if term is None:
                constant = not isinstance(value, Tensor) or isinstance(value, nn.Parameter)
                if self._inside() is not None and not constant:
                    return None  # not a write: rotations of queries and keys
                tensor = torch.as_tensor(value, dtype=out.dtype, device=out.device).detach().clone()
                term = Write(BIAS if constant else self._source(value), tensor)
            terms.append(term)
        if minus:
            terms[1] = ops.mapped(terms[1], b if isinstance(b, Tensor) else out, torch.neg)
        return added(terms, out.shape)

    def _projects(self) -> bool:
        """Whether a matrix product here keeps expressions: in attention, for values, and outside of blocks."""
        return self._inside() is not None or self._block(self.stack[-1]) is None

    def _head_writes(self, name: str, args: Any, kwargs: Any, out: Tensor) -> Term | None:
        """The writes of an attention layer, where its output projection is applied."""
        x: Any = args[1] if name == "addmm" else args[0] if args else None
        label = getattr(x, CONTEXT, None)
        if label is None or name not in ("linear", "addmm", *ops.PRODUCTS):
            return None
        if name == "linear":
            weight, bias = args[1], args[2] if len(args) > 2 else kwargs.get("bias")
        else:
            weight, bias = (args[2].mT, args[0]) if name == "addmm" else (args[1].mT, None)
        heads = dict(self._attention.values())[label]
        if weight.ndim != 2 or weight.shape[-1] % heads:
            return None
        writes: Term = HeadWrites(label, x.detach(), weight.detach(), heads)
        return writes if bias is None else added([writes, Write(BIAS, bias.detach())], out.shape)

    def _attend(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Mark attention weights, and products of them with values, up to the output projection."""
        first = next((value for value in args if isinstance(value, Tensor)), None)
        if not isinstance(out, Tensor):
            return
        inside = self._inside()
        if inside is not None and "softmax" in name:
            tag(out, WEIGHTS, True)
        elif inside is not None and (name == FUSED or (name in ops.PRODUCTS and hasattr(first, WEIGHTS))):
            tag(out, CONTEXT, self._attention[inside][0])
        elif first is not None and _keeps_heads(name, first, out):
            for mark in (WEIGHTS, CONTEXT):
                if hasattr(first, mark):
                    tag(out, mark, getattr(first, mark))

    def attend(self, call: Call) -> None:
        """An attention call, for those who ask for weights and values."""
        inside = self._inside()
        if inside is not None and call.value is not None:
            self.attended[self._attention[inside][0]] = Attended(call, term_of(call.value))

    def _inside(self) -> str | None:
        """The attention module that is running."""
        return next((name for name in reversed(self.stack) if name in self._attention), None)

    def _source(self, tensor: Tensor) -> str:
        """The name of the source of a tensor that no expression has."""
        module = getattr(tensor, MODULE, None) or self.stack[-1]
        attention = next((name for name in self._attention if f"{module}.".startswith(f"{name}.")), None)
        if attention is not None:
            return f"attention {self._attention[attention][0]}"
        block = self._block(module)
        if block is None:
            return _embedding_name(module)
        component = module.removeprefix(f"{block}.").split(".")[0]
        if block in self._blocks and self._writers.setdefault(block, component) == component:
            return f"mlp {self._blocks[block]}"
        return f"{component} {self._blocks.get(block, block)}"

    def _block(self, module: str) -> str | None:
        return block_of(module, self._depth)

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        if get_ident() != self._thread:
            return
        super().enter(name, module, args, kwargs)
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        x = next((value for value in tensors if value.is_floating_point()), None)
        if x is None:
            return
        if name in self._blocks:
            stack = re.sub(r"\d+", "", name)
            if term_of(x) is None and not any(re.sub(r"\d+", "", block) == stack for block in self._inputs):
                tag(x, TERM, Write(INPUT, x.detach().clone()))
            self._inputs[name] = term_of(x)
        if name in self._watched:
            calls = self.entered[name].calls + 1 if name in self.entered else 1
            self.entered[name] = Entered(x.detach(), term_of(x), self._inputs.get(self._block(name) or ""), calls)

    def leave(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        """A module returns."""
        if get_ident() != self._thread:
            return
        super().leave(name, module, args, out)
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, Tensor):
                tag(value, MODULE, name)


@contextmanager
def traced(model: nn.Module, layers: Sequence[Layer], patterns: bool = False) -> Iterator[Trace]:
    """Context in which what a model computes is followed; run the model inside, and `clear` between batches."""
    trace = Trace(layers)

    def listening(stack: ExitStack) -> None:
        if patterns:
            add_listener(model, trace.attend, stack)
        plain = (nn.Softmax, nn.Identity)
        trace.follow([(name, module) for name, module in model.named_modules() if not isinstance(module, plain)], stack)

    with temporarily(model, listening), trace:
        yield trace


def term_of(value: Any) -> Term | None:
    """The expression of a tensor, if it has one."""
    return getattr(value, TERM, None) if isinstance(value, Tensor) else None


def tag(tensor: Tensor, name: str, value: Any) -> None:
    """Let a tensor carry something; the tensors of a run are dropped with it."""
    setattr(tensor, name, value)


def module_of(layer: Layer) -> str:
    """The attention module of a layer; the nope and rope parts of MLA share one."""
    return layer.name.removesuffix(" (nope)").removesuffix(" (rope)")


def stem_of(layer: Layer) -> str:
    """The label of a layer's attention module, which the two kernels of MLA share."""
    return (layer.label or str(layer.index)).removesuffix(" nope").removesuffix(" rope")


def block_of(module: str, depth: int = 1) -> str | None:
    """The block of a module: its path up to the number at `depth`."""
    parts = module.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[depth - 1] + 1]) if len(numbers) >= depth else None


def _block_depth(modules: Sequence[str]) -> int:
    """The first number in the paths of attention modules that tells all of them apart."""
    most = max(sum(part.isdecimal() for part in name.split(".")) for name in modules)
    depths = (d for d in range(1, most + 1) if len({block_of(name, d) for name in modules}) == len(modules))
    return next(depths, 1)


def _in_place(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _before(args: Any) -> Any:
    """Arguments of an in-place function with a copy of the tensor that it changes, which loses its expression."""
    changed = args[0] if args else None
    if not isinstance(changed, Tensor) or not changed.is_floating_point():
        return args
    copy = changed.detach().clone()
    for name in (TERM, MODULE, WEIGHTS, CONTEXT):
        if hasattr(changed, name):
            tag(copy, name, getattr(changed, name))
    tag(changed, TERM, None)
    return (copy, *args[1:])


def _keeps_heads(name: str, first: Tensor, out: Tensor) -> bool:
    """Whether a function leaves attention weights, or products of them with values, sorted by heads."""
    return name == "__getitem__" or (out.numel() == first.numel() and name not in ("linear", "addmm", *ops.PRODUCTS))


def _embedding_name(module: str) -> str:
    last = module.split(".")[-1].lower()
    if last in EMBEDDINGS:
        return "token embedding"
    if "type" in last:
        return "token type embedding"
    return "position embedding" if any(word in last for word in ("pos", "wpe", "places")) else INPUT


def _nth(func: Any, rest: Any, kwargs: Mapping[str, Any], index: int, x: Tensor) -> Any:
    return func(x, *rest, **kwargs)[index]
