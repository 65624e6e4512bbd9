"""Norms of a head's value vectors after the output projection: ‖f(x)‖ with f(x) = W_O(W_V x + b_V)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from keyquery.capture.guard import temporarily
from keyquery.capture.hooks import entry
from keyquery.checkpoints import Heads, read
from keyquery.checkpoints.sources import bare, first_line
from keyquery.layers import Attention

Lengths = Callable[[Tensor], Tensor]


def lengths(value: Float[Tensor, "*batch n r"], output: Float[Tensor, "*heads r width"]) -> Float[Tensor, "*both n"]:
    """‖v W‖ of values v and output maps W, through the r × r matrix W Wᵀ, in float64.

    >>> lengths(torch.tensor([[3.0, 4.0]]), torch.eye(2))
    tensor([5.], dtype=torch.float64)
    """
    value, output = value.double(), output.double()
    return ((value @ (output @ output.mT)) * value).sum(-1).clamp(min=0).sqrt()


@contextmanager
def carried(model: nn.Module) -> Iterator[tuple[dict[str, Tensor], str | None]]:
    """Context with norms (batch, heads, n) of the latest input of each attention, by name; or why there are none.

    `kq.Attention` layers are used directly; weights of other models are read as in `kq.read`.
    """
    model, norms = bare(model), dict[str, Tensor]()
    thread = get_ident()

    def hear(name: str, of: Lengths, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if get_ident() != thread:  # another thread's run of the same model
            return
        entered = args[0] if args else next(part for part in options.values() if isinstance(part, Tensor))
        norms[name] = of(entered.detach())

    sources, reason = _norm_functions(model)

    def listening(stack: ExitStack) -> None:
        for name, (module_name, of) in sources.items():
            handle = model.get_submodule(module_name).register_forward_pre_hook(
                partial(hear, name, of), with_kwargs=True
            )
            stack.callback(handle.remove)

    with temporarily(model, listening):
        yield norms, reason


def _norm_functions(model: nn.Module) -> tuple[dict[str, tuple[str, Lengths]], str | None]:
    """For each attention by name: the module whose input is used, and a function for the norms."""
    own = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    if own:
        return {name: (name, partial(_own, module)) for name, module in own.items()}, None
    try:
        heads = read(model)
        layers = [layer for layer in heads if layer.kind == "self"]
        for layer in layers:
            heads.values(layer.index)
    except (ValueError, TypeError, KeyError) as error:
        return {}, first_line(error)
    return {layer.name: (entry(layer, "value"), partial(_read, heads, layer.index)) for layer in layers}, None


def _own(layer: Attention, x: Tensor) -> Float[Tensor, "batch heads n"]:
    value = layer.value(x).unflatten(-1, (layer.kv_heads, 1, layer.head_dim)).permute(0, 2, 3, 1, 4)
    output = layer.output.weight.mT.unflatten(0, (layer.kv_heads, -1, layer.head_dim))
    return lengths(value, output).flatten(1, 2)


def _read(heads: Heads, index: int, x: Tensor) -> Float[Tensor, "batch heads n"]:
    maps = heads.values(index)
    value = x[:, None, None] @ maps.value.to(x).mT
    value = value if maps.value_bias is None else value + maps.value_bias.to(x).unsqueeze(-2)
    return lengths(value, maps.output.to(x)).flatten(1, 2)
