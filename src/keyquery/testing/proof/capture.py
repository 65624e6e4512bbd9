"""The scores that a running model itself gives to a softmax, whatever its code looks like.

Every torch function is watched. A softmax whose input comes from a product of two activations is attention; the
innermost module that runs then is its owner. What enters a module that has parameters is recorded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from keyquery.capture.scores.fused import fused_scores

PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum", "mm"}
ENDS = {"linear", "layer_norm", "rms_norm", "group_norm", "batch_norm", "embedding", "conv1d", "conv2d", "conv3d"}
VIEWS = {"t", "transpose", "permute", "view", "reshape", "__get__", "to", "type_as", "float", "double", "contiguous"}
VIEWS |= {"unsqueeze", "squeeze", "flatten", "unflatten", "__getitem__", "chunk", "split", "movedim", "swapaxes"}


@dataclass(eq=False)
class Product:
    """A product of two activations; one is equal to itself alone, which tensors are not."""

    out: Tensor


@dataclass(eq=False)
class Event:
    """One softmax over scores: its owner, when it ran, its input, and the products that the input came from."""

    owner: str
    time: int
    scores: Tensor
    products: tuple[Product, ...] = ()
    used: bool = True  # whether anything is made of the softmax


@dataclass(eq=False)
class Call:
    """What entered a module, and when."""

    time: int
    inputs: list[Tensor]
    names: dict[str, Tensor]
    out: Tensor | None = None


@dataclass(eq=False)
class Capture:
    """All softmaxes of one run, and what entered every module that has parameters."""

    events: list[Event] = field(default_factory=list)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    ran: set[str] = field(default_factory=set)  # names of all modules that ran
    time: int = 0

    def tick(self) -> int:
        """The next point in time."""
        self.time += 1
        return self.time

    def before(self, module: str, time: int) -> Call | None:
        """The last call of a module before a time."""
        return next((call for call in reversed(self.calls.get(module, [])) if call.time < time), None)

    def after(self, module: str, time: int) -> Call | None:
        """The first call of a module after a time."""
        return next((call for call in self.calls.get(module, []) if call.time > time), None)


@contextmanager
def captured(model: nn.Module) -> Iterator[Capture]:
    """Record the softmaxes of what runs inside."""
    capture, handles = Capture(), []
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    for name, module in model.named_modules():
        handles += _hooked(capture, name, module)
    try:
        with torch.no_grad(), _Watch(capture):
            yield capture
        capture.events = [event for event in capture.events if event.used]  # some models compute one for nothing
    finally:
        for handle in handles:
            handle.remove()
        torch.backends.mha.set_fastpath_enabled(fast)


def _hooked(capture: Capture, name: str, module: nn.Module) -> list[Any]:
    own = next(module.parameters(recurse=False), None) is not None
    convolution = isinstance(module, (nn.Conv1d, nn.Conv2d))  # its channels come first

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        capture.stack.append(name)
        capture.ran.add(name)
        if own:
            with torch._C.DisableTorchFunctionSubclass():
                named = {key: value.detach().clone() for key, value in kwargs.items() if _dense(value)}
                inputs = [value.detach().clone() for value in args if _dense(value)]
                inputs = [value.flatten(2).mT for value in inputs] if convolution else inputs
            capture.calls.setdefault(name, []).append(Call(capture.tick(), inputs, named))

    def leave(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        while capture.stack and capture.stack.pop() != name:
            pass
        first = next(_tensors([out]), None)
        if own and first is not None:
            with torch._C.DisableTorchFunctionSubclass():
                capture.calls[name][-1].out = first.detach().clone()

    if isinstance(module, (nn.Softmax, nn.Dropout, nn.Identity)):
        return []
    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, with_kwargs=True),
    ]


def _dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class _Watch(TorchFunctionMode):
    """Marks products of activations, follows them, and records softmaxes over what came from them."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.capture = capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in VIEWS:
            for tensor in _tensors([*args, *kwargs.values()]):
                if (event := getattr(tensor, "_kq_event", None)) is not None:
                    event.used = True
        if name == "softmax":
            event, out = self._softmax(args, kwargs), func(*args, **kwargs)
            if event is not None:
                event.used, out._kq_event = False, event
            return out
        if name == "relu" and (products := getattr(args[0], "_kq_products", ())):
            self._record(args[0], *products)  # scores of an indexer
        if name == "scaled_dot_product_attention":
            scores, masked = fused_scores(*args, **kwargs)
            self._record(masked, Product(scores))
        elif name == "multi_head_attention_forward":
            self._record(*_packed_scores(func, args, kwargs))
        out = func(*args, **kwargs)
        if name in PRODUCTS:
            self._product(args, kwargs, out)
        elif name not in ENDS and "softmax" not in name:
            self._follow(name, args, kwargs, out)
        return out

    def _record(self, scores: Tensor, *products: Product) -> Event:
        owner = self.capture.stack[-1] if self.capture.stack else ""
        self.capture.events.append(Event(owner, self.capture.tick(), scores.detach().clone(), products))
        return self.capture.events[-1]

    def _softmax(self, args: Any, kwargs: Any) -> Event | None:
        scores = args[0] if args else kwargs["input"]
        products = getattr(scores, "_kq_products", ())
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        if products and scores.ndim >= 2 and isinstance(dim, int):
            return self._record(scores.movedim(dim, -1), *products)
        return None

    def _product(self, args: Any, kwargs: Any, out: Any) -> None:
        operands = list(_tensors([*args, *kwargs.values()]))
        if len(operands) < 2:
            return
        left, right = operands[-2:]
        if not (_weight(left) or _weight(right)) and isinstance(out, Tensor) and out.ndim >= 2:
            with torch._C.DisableTorchFunctionSubclass():
                kept = out.detach().clone()  # biases may be added to it in place
            out._kq_products = (Product(kept),)  # type: ignore[attr-defined]

    def _follow(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        given = list(_tensors([*args, *kwargs.values()]))
        products = tuple(dict.fromkeys(p for t in given for p in getattr(t, "_kq_products", ())))
        weight = name in VIEWS and bool(given) and _weight(given[0])
        if not products and not weight and not (given and hasattr(given[0], "_kq_event")):
            return
        for tensor in _tensors([out]):
            if products and tensor.is_floating_point():
                tensor._kq_products = products  # type: ignore[attr-defined]
            if name in VIEWS and (event := getattr(given[0], "_kq_event", None)) is not None:
                tensor._kq_event = event  # type: ignore[attr-defined]
            if weight and not isinstance(tensor, nn.Parameter):
                tensor._kq_weight = True  # type: ignore[attr-defined]


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or getattr(tensor, "_kq_weight", False)


def _packed_scores(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Product]:
    """The scores inside nn.MultiheadAttention, with their mask, and their product of queries and keys."""
    given = inspect.signature(inspect.unwrap(func)).bind(*args, **kwargs).arguments
    query, key, heads = given["query"], given["key"], given["num_heads"]
    if given.get("use_separate_proj_weight"):
        weights = [given["q_proj_weight"], given["k_proj_weight"]]
    else:
        weights = list(given["in_proj_weight"].chunk(3)[:2])
    bias = given.get("in_proj_bias")
    biases = [None, None] if bias is None else list(bias.chunk(3)[:2])
    query, key = (nn.functional.linear(t, w, b) for t, w, b in zip((query, key), weights, biases, strict=True))
    if query.ndim == 2:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
    query, key = (t.reshape(t.shape[0], -1, t.shape[-1] // heads).transpose(0, 1) for t in (query, key))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    mask = given.get("attn_mask")
    if mask is None:
        return scores, Product(scores)
    masked = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return masked, Product(scores)
