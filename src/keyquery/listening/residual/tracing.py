"""Follow the residual stream of a running model: every tensor that is a sum of writes carries its expression.

Torch functions are watched, so that any arrangement of blocks is followed: pre- and post-norm, parallel blocks, norms
after attention, multipliers. Attention and MLPs end an expression: what they add to the stream is a new write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints import Layer
from keyquery.checkpoints.heads import EMBEDDINGS
from keyquery.listening.call import Call
from keyquery.listening.exclusive import temporarily
from keyquery.listening.hooks import entry, module_of
from keyquery.listening.listen import add_listener
from keyquery.listening.products import DIVIDE, MULTIPLY, VIEWS, ModuleMode, linear_map
from keyquery.listening.residual.terms import BIAS, HeadWrites, Mapped, Sum, Term, Write, added

INPUT = "input embedding"
ADD = {"add", "__add__", "__radd__", "__iadd__", "add_"}
SUBTRACT = {"sub", "__sub__", "__isub__", "sub_"}
LINEAR = {"dropout", "neg", "__neg__", "mean", "sum", "where", "masked_fill", "repeat", "repeat_interleave", "pad"}
LINEAR |= VIEWS  # linear in the first argument, with all others fixed
TERM, MODULE = "_kq_term", "_kq_module"  # what a tensor carries: its expression, and the module that it left


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
        attending = [layer for layer in layers if layer.kind == "self"]
        self._watched = {entry(layer) for layer in attending}
        self._depth = _block_depth(sorted({module_of(layer) for layer in attending}))
        self._blocks = {block_of(module_of(layer), self._depth) or "": stem_of(layer) for layer in attending}
        self._thread = get_ident()
        self.clear()

    def clear(self) -> None:
        """Forget a run."""
        self.stack.clear()
        self.attended: dict[str, Attended] = {}
        self.entered: dict[str, Entered] = {}
        self._writers: dict[str, str] = {}
        self._inputs: dict[str, Term | None] = {}
        self._attends: tuple[str, int] | None = None  # label and heads of attention that is not projected yet

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        before = _before(args) if self.stack and _in_place(name) else args
        out = func(*args, **kwargs)
        if self.stack:
            self._follow(name, func, before, kwargs, out)
        return out

    def _follow(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if name == "embedding":
            setattr(out, TERM, Write(self._source(out), out.detach().clone()))
            return
        if name == "multi_head_attention_forward":  # which projects its output itself
            self._attends = None
        first = next((value for value in args if isinstance(value, Tensor)), None)
        if isinstance(out, Tensor) and out is not first:
            term = self._term(name, func, args, kwargs, out)
            if term is not None or hasattr(out, TERM):
                setattr(out, TERM, term)
        elif name in ("chunk", "split") and first is not None and term_of(first) is not None:
            for index, part in enumerate(out):
                map_of_part = _mapped(first, lambda x, index=index: func(x, *args[1:], **kwargs)[index])
                setattr(part, TERM, map_of_part)

    def _term(self, name: str, func: Any, args: Any, kwargs: Any, out: Tensor) -> Term | None:
        """The expression of a result; None where it is not linear in any write."""
        applied = linear_map(name, args, kwargs)
        if applied is not None:
            activations = term_of(args[2] if name == "addmm" else args[1])  # as in attention without a batch
            return None if activations is not None else self._projected(*applied, out)
        a: Any = args[0] if args else None
        b: Any = args[1] if len(args) > 1 else kwargs.get("other")
        left, right = term_of(a), term_of(b)
        if left is None and (right is None or name not in ADD | SUBTRACT | MULTIPLY):
            return None
        if name in ADD | SUBTRACT and "alpha" not in kwargs:
            return self._sum(a, b, name in SUBTRACT, out)
        if name in MULTIPLY | DIVIDE and (left is None or right is None):
            like, factor = (b, a) if left is None else (a, b)
            factor = factor.detach() if isinstance(factor, Tensor) else factor
            return _mapped(like, (lambda x: x / factor) if name in DIVIDE else (lambda x: x * factor))
        if name in ("layer_norm", "rms_norm"):
            return _normed(a, out, name == "layer_norm", *args[1:], **kwargs)
        return _mapped(a, lambda x: func(x, *args[1:], **kwargs)) if name in LINEAR else None

    def _projected(self, x: Any, weight: Tensor, bias: Tensor | None, out: Tensor) -> Term | None:
        """The expression of x Wᵀ + b: of heads where it is the first projection after attention.

        Otherwise it keeps expressions in attention, for values, and outside of blocks.
        """
        term: Term
        if term_of(x) is not None:
            if self._inside() is None and block_of(self.stack[-1], self._depth) is not None:
                return None
            term = _mapped(x, lambda x: x @ weight.detach().mT)
        else:
            label, heads = self._attends or ("", 1)
            self._attends = None
            if not label or weight.shape[-1] % heads:
                return None
            term = HeadWrites(label, x.detach(), weight.detach(), heads)
        return term if bias is None else added([term, Write(BIAS, bias.detach())], out.shape)

    def _sum(self, a: Any, b: Any, minus: bool, out: Tensor) -> Term | None:
        terms = []
        for value in (a, b):
            term = term_of(value)
            if term is None:
                constant = not isinstance(value, Tensor) or isinstance(value, nn.Parameter)
                if self._inside() is not None and not constant:
                    return None  # not a write: rotations of queries and keys
                if not constant:
                    self._attends = None  # it is written as it is
                tensor = torch.as_tensor(value, dtype=out.dtype, device=out.device).detach().clone()
                term = Write(BIAS if constant else self._source(value), tensor)
            terms.append(term)
        if minus:
            like = b if isinstance(b, Tensor) else out
            terms[1] = Mapped(terms[1], torch.neg, like.shape, like.dtype)
        return added(terms, out.shape)

    def attend(self, call: Call) -> None:
        """An attention call, whose output is projected next."""
        inside = self._inside()
        if inside is not None and call.value is not None:
            self._attends = self._attention[inside]
            self.attended[self._attends[0]] = Attended(call, term_of(call.value))

    def _inside(self) -> str | None:
        """The attention module that is running."""
        return next((name for name in reversed(self.stack) if name in self._attention), None)

    def _source(self, tensor: Tensor) -> str:
        """The name of the source of a tensor that no expression has."""
        module = getattr(tensor, MODULE, None) or self.stack[-1]
        attention = next((name for name in self._attention if f"{module}.".startswith(f"{name}.")), None)
        if attention is not None:
            return f"attention {self._attention[attention][0]}"
        block = block_of(module, self._depth)
        if block is None:
            return _embedding_name(module)
        component = module.removeprefix(f"{block}.").split(".")[0]
        if block in self._blocks and self._writers.setdefault(block, component) == component:
            return f"mlp {self._blocks[block]}"
        return f"{component} {self._blocks.get(block, block)}"

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
                setattr(x, TERM, Write(INPUT, x.detach().clone()))
            self._inputs[name] = term_of(x)
        if name in self._watched:
            calls = self.entered[name].calls + 1 if name in self.entered else 1
            block = self._inputs.get(block_of(name, self._depth) or "")
            self.entered[name] = Entered(x.detach(), term_of(x), block, calls)

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """A module returns."""
        if get_ident() != self._thread:
            return
        super().leave(name, module, args, kwargs, out)
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, Tensor):
                setattr(value, MODULE, name)


@contextmanager
def traced(model: nn.Module, layers: Sequence[Layer]) -> Iterator[Trace]:
    """Context in which what a model computes is followed; run the model inside, and `clear` between batches."""
    trace = Trace(layers)

    def listening(stack: ExitStack) -> None:
        add_listener(model, trace.attend, stack)
        plain = (nn.Softmax, nn.Identity)
        trace.follow([(name, module) for name, module in model.named_modules() if not isinstance(module, plain)], stack)

    with temporarily(model, listening), trace:
        yield trace


def term_of(value: Any) -> Term | None:
    """The expression of a tensor, if it has one."""
    return getattr(value, TERM, None) if isinstance(value, Tensor) else None


def _mapped(x: Tensor, function: Any) -> Mapped:
    """A linear function of a tensor that has a term."""
    return Mapped(getattr(x, TERM), function, x.shape, x.dtype)


def _normed(
    x: Tensor,
    out: Tensor,
    centred: bool,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
) -> Term:
    """LayerNorm, or RMSNorm if not `centred`, with its statistics held at those of x; its shift is a bias."""
    wide = x.detach().float() if x.dtype != torch.float64 else x.detach()
    wide = wide - wide.mean(-1, keepdim=True) if centred else wide
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    gain = (wide.square().mean(-1, keepdim=True) + eps).rsqrt().to(x.dtype)
    gain = gain if weight is None else gain * weight.detach()
    image = _mapped(x, lambda t: (t - t.mean(-1, keepdim=True) if centred else t) * gain)
    return image if bias is None else Sum((image, Write(BIAS, bias.detach())), out.shape)


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
    for name in (TERM, MODULE):
        if hasattr(changed, name):
            setattr(copy, name, getattr(changed, name))
    setattr(changed, TERM, None)
    return (copy, *args[1:])


def _embedding_name(module: str) -> str:
    last = module.split(".")[-1].lower()
    if last in EMBEDDINGS:
        return "token embedding"
    if "type" in last:
        return "token type embedding"
    return "position embedding" if any(word in last for word in ("pos", "wpe", "places")) else INPUT
