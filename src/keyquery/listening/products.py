"""A torch function mode that follows products of activations to the softmax over them, and on to the values.

That is attention, whatever the code of a model looks like. Tensors carry what they came from as attributes, which end
with them: products of two activations, and the factor on each since then; the softmax that weights came out of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from keyquery.listening.tokens import Bound

PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum", "mm"}
FUSED = {"scaled_dot_product_attention", "multi_head_attention_forward"}
ENDS = {"linear", "layer_norm", "rms_norm", "group_norm", "batch_norm", "embedding", "conv1d", "conv2d", "conv3d"}
VIEWS = {"t", "transpose", "permute", "view", "reshape", "__get__", "to", "type_as", "float", "double", "contiguous"}
VIEWS |= {"unsqueeze", "squeeze", "flatten", "unflatten", "__getitem__", "chunk", "split", "movedim", "swapaxes"}
VIEWS |= {"half", "bfloat16", "type", "clone", "expand", "expand_as", "view_as"}
MOVES = {"t", "transpose", "permute", "movedim", "swapaxes", "__get__"}
MULTIPLY = {"mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply"}
DIVIDE = {"div", "__truediv__", "__itruediv__", "div_", "divide", "true_divide"}
SUBTRACT = {"sub", "__sub__", "__isub__", "sub_", "subtract", "__rsub__", "rsub"}
ADD = {"add", "__add__", "__radd__", "__iadd__", "add_", "masked_fill", "masked_fill_", "where", *SUBTRACT}
HIDE = {"masked_fill", "where", "nan_to_num"}  # of attention weights: hidden keys have none already


@dataclass(eq=False)
class Product:
    """A product of two activations: its function and operands; `kept` is a copy of its value, where one is kept."""

    function: str
    operands: tuple[Tensor, Tensor]
    equation: str | None = None
    kept: Tensor | None = None

    @property
    def sides(self) -> tuple[Tensor, Tensor] | None:
        """Left (…, n, r) and right (…, m, r) operand; None if its equation has another form."""
        left, right = self.operands
        if self.equation is None:
            return left, right.mT
        order = Contraction.of(self.equation, left.ndim, right.ndim)
        return None if order is None else (left.permute(order.left), right.permute(order.right))


@dataclass(frozen=True)
class Scaled:
    """A product that a tensor came from, and the number it was multiplied by since; None: by something else."""

    product: Product
    factor: float | None = 1.0


@dataclass(eq=False)
class Softmax:
    """One softmax over scores: its input with keys last, what that came from, and the module that ran."""

    owner: str
    scores: Tensor
    products: tuple[Scaled, ...] = ()
    used: bool = False  # whether anything is made of its result
    seen: bool = False  # whether its product with values was seen
    swapped: bool = False  # whether it is over rows: the product was of keys with queries
    dropout: float = 0.0  # of its result
    time: int = 0  # when it ran, where times are kept

    @property
    def kept(self) -> list[Tensor]:
        """Copies of the products that its input came from, where they are kept."""
        return [scaled.product.kept for scaled in self.products if scaled.product.kept is not None]


class ModuleMode(TorchFunctionMode):
    """A function mode that knows which module runs, by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []

    def follow(self, modules: Iterable[tuple[str, nn.Module]], changes: ExitStack) -> None:
        """Add the hooks."""
        for name, module in modules:
            enter, leave = Bound(partial(self.enter, name)), Bound(partial(self.leave, name))
            changes.callback(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
            changes.callback(module.register_forward_hook(leave, always_call=True).remove)

    def owner(self) -> str:
        """The innermost module that runs."""
        return self.stack[-1] if self.stack else ""

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        self.stack.append(name)

    def leave(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        """A module returns."""
        while self.stack and self.stack.pop() != name:
            pass


class Products(ModuleMode):
    """Follows attention through torch functions; subclasses say what to do with it. `keep` copies products."""

    keep = False

    def softmax(self, event: Softmax) -> None:
        """A softmax over products of activations."""

    def fused(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Attention as one torch function; returns its result."""
        return func(*args, **kwargs)

    def valued(self, event: Softmax, func: Any, args: Any, kwargs: Any) -> Any:
        """The product of attention weights with values; returns it."""
        return func(*args, **kwargs)

    def idle(self) -> bool:
        """Whether torch functions are none of this mode's business now."""
        return False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.idle():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in FUSED:
            return self.fused(name, func, args, kwargs)
        if name == "softmax":
            return self._softmax(func, args, kwargs)
        given = list(tensors([*args, *kwargs.values()]))
        event = getattr(given[0], "_kq_softmax", None) if given else None
        if name not in VIEWS:
            for tensor in given:
                if (used := getattr(tensor, "_kq_softmax", None)) is not None:
                    used.used = True
        if name in PRODUCTS:
            if event is not None and len(given) > 1:
                event.seen = True
                return self.valued(event, func, args, kwargs)
            out = func(*args, **kwargs)
            self._product(name, args, kwargs, given, out)
            return out
        out = func(*args, **kwargs)
        if name not in ENDS:
            self._follow(name, args, kwargs, given, out)
            _follow_scale(name, func, args, kwargs, given, out)
        return out

    def _softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
        scores = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        products = getattr(scores, "_kq_products", ())
        out = func(*args, **kwargs)
        if products and scores.ndim >= 2 and isinstance(dim, int):
            rows = dim in (-2, scores.ndim - 2)
            event = Softmax(self.owner(), scores.movedim(dim, -1), products, swapped=rows)
            self.softmax(event)
            out._kq_softmax = event
        return out

    def _product(self, name: str, args: Any, kwargs: Any, given: list[Tensor], out: Any) -> None:
        if len(given) < 2 or not isinstance(out, Tensor) or out.ndim < 2:
            return
        left, right = given[-2:]
        if name == "__rmatmul__":
            left, right = right, left
        if is_weight(left) or is_weight(right):
            return
        factor = float(kwargs.get("alpha", 1.0)) if name == "baddbmm" else 1.0
        (left, of_left), (right, of_right) = unscaled(left), unscaled(right)
        kept = None
        if self.keep:
            with torch._C.DisableTorchFunctionSubclass():
                kept = out.detach().clone()  # biases may be added to it in place
        equation = next((part for part in args if isinstance(part, str)), None)
        product = Product(name, (left, right), equation, kept)
        out._kq_products = (Scaled(product, factor * of_left * of_right),)  # type: ignore[attr-defined]

    def _follow(self, name: str, args: Any, kwargs: Any, given: list[Tensor], out: Any) -> None:
        scaled = dict.fromkeys(
            _times(product, _factor(name, args, kwargs, tensor))
            for tensor in given
            for product in getattr(tensor, "_kq_products", ())
        )
        weight = name in VIEWS and bool(given) and is_weight(given[0])
        event = getattr(given[0], "_kq_softmax", None) if given else None
        if name not in VIEWS | {"dropout"} and not (event is not None and name in HIDE and _same(given[0], out)):
            event = None
        if not scaled and not weight and event is None:
            return
        if event is not None and name == "dropout":
            given_by = bound(("input", "p", "training"), args, kwargs)
            event.dropout = float(given_by.get("p", 0.5)) if given_by.get("training", True) else 0.0
        for tensor in tensors([out]):
            if scaled and tensor.is_floating_point():
                tensor._kq_products = tuple(scaled)  # type: ignore[attr-defined]
            if event is not None:
                tensor._kq_softmax = event  # type: ignore[attr-defined]
                tensor._kq_moved = name in MOVES or getattr(given[0], "_kq_moved", False)  # type: ignore[attr-defined]
            if weight and not isinstance(tensor, nn.Parameter):
                tensor._kq_weight = True  # type: ignore[attr-defined]


def _same(weights: Tensor, out: Any) -> bool:
    """Whether weights are the same as before, but for queries that see no key: their softmax is NaN."""
    with torch._C.DisableTorchFunctionSubclass():
        return out.shape == weights.shape and bool(((out == weights) | (weights.isnan() & (out == 0))).all())


def _factor(name: str, args: Any, kwargs: Any, tensor: Tensor) -> float | None:
    """The number by which a function multiplies one of its arguments; None if it does something else."""
    if name in VIEWS:
        return 1.0
    if name in ADD:
        second = len(args) > 1 and args[1] is tensor
        sign = -1.0 if name in SUBTRACT and second != name.startswith(("r", "__r")) else 1.0
        return sign * float(kwargs.get("alpha", 1.0)) if second else sign
    if name not in MULTIPLY | DIVIDE or len(args) < 2:
        return None
    numbers = [part for part in args[:2] if not isinstance(part, Tensor) or part.numel() == 1]
    other = numbers[-1] if numbers else None
    if not isinstance(other, (int, float, Tensor)) or isinstance(other, nn.Parameter):
        return None
    return 1 / float(other) if name in DIVIDE else float(other)


def unscaled(tensor: Tensor) -> tuple[Tensor, float]:
    """A tensor before a number scaled it, and that number: some models scale queries or keys before their product."""
    before, factor, versions = getattr(tensor, "_kq_scaled", (tensor, 1.0, None))
    unchanged = versions == (_version(before), _version(tensor))  # neither was changed in place since
    return (before, factor) if unchanged else (tensor, 1.0)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; in inference mode it is not known."""
    return -1 if tensor.is_inference() else tensor._version


def _follow_scale(name: str, func: Any, args: Any, kwargs: Any, given: list[Tensor], out: Any) -> None:
    """Let a result carry the tensor that it is a multiple of, also through views."""
    if not given or not isinstance(out, Tensor) or out is given[0] or not out.is_floating_point():
        return
    if out.is_inference():  # what is changed in place there cannot be told
        return
    if name in MULTIPLY | DIVIDE:
        long = [tensor for tensor in given if tensor.numel() > 1]
        factor = _factor(name, args, kwargs, long[0]) if len(long) == 1 else None
        if factor is not None and out.shape == long[0].shape:
            before, earlier = unscaled(long[0])
            _carry(out, before, earlier * factor)
    elif name in VIEWS and hasattr(given[0], "_kq_scaled") and args and args[0] is given[0]:
        before, factor = unscaled(given[0])
        if before is not given[0]:
            with torch._C.DisableTorchFunctionSubclass():
                _carry(out, func(before, *args[1:], **kwargs), factor)


def _carry(out: Tensor, before: Tensor, factor: float) -> None:
    out._kq_scaled = before, factor, (_version(before), _version(out))  # type: ignore[attr-defined]


def _times(scaled: Scaled, factor: float | None) -> Scaled:
    known = factor is not None and scaled.factor is not None
    return Scaled(scaled.product, scaled.factor * factor if known else None)  # type: ignore[operator]


def tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """All tensors among arguments, also in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one: a product with it is a projection."""
    return isinstance(tensor, nn.Parameter) or getattr(tensor, "_kq_weight", False)


@dataclass(frozen=True)
class Contraction:
    """An einsum over one index as (…, n, c) × (…, m, c) → (…, n, m): how to permute both operands and the result."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    out: tuple[int, ...]

    @classmethod
    def of(cls, equation: str, left_dims: int, right_dims: int) -> Contraction | None:
        """The order of an equation such as "bqhd,bkhd->bhqk"; None if it has another form."""
        sides, _, out = equation.replace(" ", "").partition("->")
        left, _, right = sides.partition(",")
        spare = "ZYXWV"
        left, right, out = (
            _spelled(side, dims, spare) for side, dims in ((left, left_dims), (right, right_dims), (out, 0))
        )
        shared = [index for index in left if index in right and index not in out]
        rows, columns = (
            [i for i in side if i not in other and i in out] for side, other in ((left, right), (right, left))
        )
        batch = [index for index in out if index in left and index in right]
        if len(shared) != 1 or len(rows) != 1 or len(columns) != 1 or len(batch) != len(out) - 2:
            return None
        return cls(
            tuple(left.index(index) for index in (*batch, *rows, *shared)),
            tuple(right.index(index) for index in (*batch, *columns, *shared)),
            tuple(out.index(index) for index in (*batch, *rows, *columns)),
        )

    def result(self, x: Tensor) -> Tensor:
        """A tensor (…, n, m) in the order of the equation's result."""
        return x.permute([self.out.index(dim) for dim in range(x.ndim)])


def _spelled(side: str, dims: int, spare: str) -> str:
    """A side of an equation with its ellipsis as letters; the result has as many as the first operand needs."""
    if "..." not in side:
        return side
    count = dims - len(side) + 3 if dims else 2
    return side.replace("...", spare[:count])


def bound(names: Sequence[str], args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a torch function by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}
