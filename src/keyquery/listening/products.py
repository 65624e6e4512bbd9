"""A torch function mode that follows products of activations to the softmax over them, and on to the values.

That is attention, whatever the code of a model looks like. Tensors carry where they come from as an attribute, which
ends with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from keyquery.listening.hooks import on_input, on_output

PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum", "mm"}
FUSED = {"scaled_dot_product_attention", "multi_head_attention_forward"}
ENDS = {"linear", "layer_norm", "rms_norm", "group_norm", "batch_norm", "embedding", "conv1d", "conv2d", "conv3d"}
MOVES = {"t", "transpose", "permute", "movedim", "swapaxes", "__get__"}
VIEWS = {"view", "reshape", "to", "type_as", "float", "double", "contiguous", "half", "bfloat16", "type", "clone"}
VIEWS |= {"unsqueeze", "squeeze", "flatten", "unflatten", "__getitem__", "chunk", "split", "expand", "expand_as"}
VIEWS |= {"view_as", *MOVES}
MULTIPLY = {"mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply"}
DIVIDE = {"div", "__truediv__", "__itruediv__", "div_", "divide", "true_divide"}
SUBTRACT = {"sub", "__sub__", "__isub__", "sub_", "subtract", "__rsub__", "rsub"}
ADD = {"add", "__add__", "__radd__", "__iadd__", "add_", "masked_fill", "masked_fill_", "where", *SUBTRACT}
HIDE = {"masked_fill", "where", "nan_to_num"}  # of attention weights: hidden keys have none already


class Scaled(NamedTuple):
    """A product of two activations that a tensor came from, and the number it was multiplied by since.

    Operands are (…, n, r) and (…, m, r), or None if the equation of the product has another form.
    """

    sides: tuple[Tensor, Tensor] | None
    factor: float | None = 1.0  # None: it was multiplied by something else


@dataclass(eq=False)
class Softmax:
    """One softmax over scores: its input with keys last, what that came from, and the module that ran."""

    owner: str
    scores: Tensor
    products: tuple[Scaled, ...] = ()
    used: bool = False  # whether anything is made of its result
    seen: bool = False  # whether its product with values was seen
    swapped: bool = False  # whether it is over rows: the product was of keys with queries
    changed: bool = False  # whether its result was moved or masked since
    dropout: float = 0.0  # of its result
    time: int = 0  # when it ran, where times are kept

    def unscaled(self) -> list[Tensor]:
        """The products that its input came from."""
        return [left @ right.mT for left, right in (product.sides for product in self.products if product.sides)]


class Multiple(NamedTuple):
    """The tensor that another is a multiple of; and how often both had been changed in place."""

    of: Tensor
    factor: float
    versions: tuple[int, int]


class Origin(NamedTuple):
    """Where a tensor comes from; `is_weight`: from a parameter alone, so that a product with it is a projection."""

    products: tuple[Scaled, ...] = ()
    softmax: Softmax | None = None
    multiple: Multiple | None = None
    is_weight: bool = False


NOWHERE = Origin()


class ModuleMode(TorchFunctionMode):
    """A function mode that knows which module runs, by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []

    def follow(self, modules: Iterable[tuple[str, nn.Module]], changes: ExitStack) -> None:
        """Add the hooks."""
        for name, module in modules:
            on_input(module, partial(self.enter, name), changes, first=True)
            on_output(module, partial(self.leave, name), changes, always=True)

    def owner(self) -> str:
        """The innermost module that runs."""
        return self.stack[-1] if self.stack else ""

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        self.stack.append(name)

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """A module returns."""
        while self.stack and self.stack.pop() != name:
            pass


class Products(ModuleMode):
    """Follows attention through torch functions; subclasses say what to do with it."""

    def softmax(self, event: Softmax) -> None:
        """A softmax over products of activations."""

    def fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Attention as one torch function; returns its result."""
        return func(*args, **kwargs)

    def valued(self, event: Softmax, func: Any, args: Any, kwargs: Any) -> Any:
        """The product of attention weights with values; returns it."""
        return func(*args, **kwargs)

    def idle(self) -> bool:
        """Whether torch functions are none of this mode's business now."""
        return False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self.idle():
            return func(*args, **kwargs)
        if name in FUSED:
            return self.fused(func, args, kwargs)
        if name == "softmax":
            return self._softmax(func, args, kwargs)
        given = list(tensors([*args, *kwargs.values()]))
        event = origin(given[0]).softmax if given else None
        for tensor in given if name not in VIEWS else ():
            if (used := origin(tensor).softmax) is not None:
                used.used = True
        if name in PRODUCTS and event is not None and len(given) > 1:
            event.seen = True
            return self.valued(event, func, args, kwargs)
        out = func(*args, **kwargs)
        if name in PRODUCTS:
            self._product(name, args, kwargs, given, out)
        elif name not in ENDS and given and next(tensors([out]), None) is not None:
            known = _followed(name, args, kwargs, given)
            known = known._replace(multiple=_multiple(name, func, args, kwargs, given, out))
            for tensor in tensors([out]):
                _set(tensor, known if tensor.is_floating_point() else known._replace(products=()))
        return out

    def _softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
        scores = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        products = origin(scores).products
        out = func(*args, **kwargs)
        if products and scores.ndim >= 2 and isinstance(dim, int):
            rows = dim in (-2, scores.ndim - 2)
            event = Softmax(self.owner(), scores.movedim(dim, -1), products, swapped=rows)
            self.softmax(event)
            _set(out, Origin(softmax=event))
        return out

    def _product(self, name: str, args: Any, kwargs: Any, given: list[Tensor], out: Any) -> None:
        if len(given) < 2 or not isinstance(out, Tensor) or out.ndim < 2 or any(map(is_weight, given[-2:])):
            return
        left, right = given[-2:] if name != "__rmatmul__" else given[:-3:-1]
        (left, of_left), (right, of_right) = unscaled(left), unscaled(right)
        equation = equation_of(args)
        order = None if equation is None else contraction(equation)
        sides = None
        with torch._C.DisableTorchFunctionSubclass():
            if order is not None:
                sides = torch.einsum(order.left, left), torch.einsum(order.right, right)
            elif equation is None and min(left.ndim, right.ndim) > 1:
                sides = left, right.mT
        factor = float(kwargs.get("alpha", 1.0)) if name == "baddbmm" else 1.0
        _set(out, Origin((Scaled(sides, factor * of_left * of_right),)))


def origin(tensor: Tensor) -> Origin:
    """Where a tensor comes from, as far as it was followed."""
    return getattr(tensor, "_kq_origin", NOWHERE)


def _set(tensor: Tensor, known: Origin) -> None:
    if any(known) and not isinstance(tensor, nn.Parameter):
        tensor._kq_origin = known  # type: ignore[attr-defined]


def _followed(name: str, args: Any, kwargs: Any, given: list[Tensor]) -> Origin:
    """Where the result of a function comes from, but for what it is a multiple of."""
    products: dict[Any, Scaled] = {}  # each once: sums of sums would double them
    for tensor in given:
        factor = _factor(name, args, kwargs, tensor) if origin(tensor).products else None
        for sides, before in origin(tensor).products:
            total = None if factor is None or before is None else before * factor
            products[id(sides), total] = Scaled(sides, total)
    event = origin(given[0]).softmax if name in VIEWS | HIDE | {"dropout"} else None
    if event is not None:
        event.changed |= name in MOVES | HIDE
        if name == "dropout":
            options = bound(("input", "p", "training"), args, kwargs)
            event.dropout = float(options.get("p", 0.5)) if options.get("training", True) else 0.0
    return Origin(tuple(products.values()), event, is_weight=name in VIEWS and is_weight(given[0]))


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
    multiple = origin(tensor).multiple
    if multiple is None or multiple.versions != (multiple.of._version, tensor._version):  # changed in place since
        return tensor, 1.0
    return multiple.of, multiple.factor


def _multiple(name: str, func: Any, args: Any, kwargs: Any, given: list[Tensor], out: Any) -> Multiple | None:
    """What a result is a multiple of, also through views; in inference mode changes in place cannot be told."""
    if not isinstance(out, Tensor) or out is given[0] or not out.is_floating_point():
        return None
    if any(tensor.is_inference() for tensor in (out, *given)):
        return None
    long = [tensor for tensor in given if tensor.numel() > 1]
    if name in MULTIPLY | DIVIDE and len(long) == 1 and out.shape == long[0].shape:
        before, earlier = unscaled(long[0])
        factor = _factor(name, args, kwargs, long[0])
        return None if factor is None else Multiple(before, earlier * factor, (before._version, out._version))
    before, factor = unscaled(given[0])
    if name not in VIEWS or before is given[0] or args[0] is not given[0]:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        before = func(before, *args[1:], **kwargs)
    return Multiple(before, factor, (before._version, out._version))


def tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """All tensors among arguments, also in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one: a product with it is a projection."""
    return isinstance(tensor, nn.Parameter) or origin(tensor).is_weight


class Contraction(NamedTuple):
    """An einsum over one index as (…, n, c) × (…, m, c) → (…, n, m): the equations that permute each to and from it."""

    left: str
    right: str
    out: str


def contraction(equation: str) -> Contraction | None:
    """The order of an equation such as "bqhd,bkhd->bhqk"; None if it has another form."""
    left, right, out, *_ = [*re.split(",|->", equation.replace(" ", "")), "", ""]
    dots = "..." if "..." in out else ""
    batch = "".join(index for index in out if index in left and index in right and index != ".")
    row = "".join(index for index in left if index in out and index not in right)
    column = "".join(index for index in right if index in out and index not in left)
    shared = "".join(index for index in left if index in right and index not in out)
    if [len(shared), len(row), len(column), len(batch)] != [1, 1, 1, len(out) - len(dots) - 2]:
        return None
    batch = dots + batch
    return Contraction(
        f"{left}->{batch}{row}{shared}", f"{right}->{batch}{column}{shared}", f"{batch}{row}{column}->{out}"
    )


def equation_of(args: Sequence[Any]) -> str | None:
    """The equation of an einsum."""
    return next((part for part in args if isinstance(part, str)), None)


def linear_map(name: str, args: Sequence[Any], kwargs: Any) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The input, the weight (out, in) and the bias of a linear map; None if a function is none."""
    if name == "linear":
        return args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
    if name == "addmm" and args[2].ndim == 2:
        return args[1], args[2].mT, args[0]
    return (args[0], args[1].mT, None) if name in ("matmul", "__matmul__") and args[1].ndim == 2 else None


def bound(names: Sequence[str], args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a torch function by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}
