"""Activations of the modules of a running model: padding is dropped, the model is left unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer
from keyquery.checkpoints.sources import bare
from keyquery.listening.exclusive import Change, hold, temporarily
from keyquery.listening.tokens import Bound, context_of, mask_for, masks_of
from keyquery.listening.tokens import has_two_sides as has_two_sides
from keyquery.support.printable import first_line

Batch = Mapping[str, Tensor]


@contextmanager
def watch(model: nn.Module, listeners: Mapping[str, Callable[[Tensor], None]]) -> Iterator[Callable[[Batch], Any]]:
    """Context whose function runs a batch; each listener gets the inputs of its module.

    A listener gets the non-padding tokens of the batch, (n, width). The model runs in eval mode without gradients, and
    is restored afterwards, also after an exception.

    Parameters
    ----------
    model
        The live model.
    listeners
        Functions by the name of the module whose inputs they get.

    Returns
    -------
    context manager
        Its value is a function that runs a batch.

    Examples
    --------
    >>> linear, heard = torch.nn.Linear(3, 2), []
    >>> with watch(linear, {"": heard.append}) as run:
    ...     _ = run({"input": torch.ones(2, 4, 3)})
    >>> heard[0].shape
    torch.Size([8, 3])
    """
    model, masks = bare(model), dict[str, Tensor]()
    paired = has_two_sides(model)

    thread = get_ident()

    def hook(name: str, listen: Callable[[Tensor], None]) -> Callable[..., None]:
        def hear(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if get_ident() != thread:  # another thread's run of the same model
                return
            entered = args[0] if args else next(v for v in kwargs.values() if isinstance(v, Tensor))
            if getattr(module, "batch_first", True) is False and entered.ndim == 3:
                entered = entered.transpose(0, 1)
            real = mask_for(masks, entered.shape[:2], name, paired)
            listen(entered.detach()[real.to(entered.device)] if real is not None else entered.detach().flatten(0, -2))

        return hear

    def run(batch: Batch) -> Any:
        device = next((weight.device for weight in model.parameters()), None)
        batch = {name: tensor.to(device) if isinstance(tensor, Tensor) else tensor for name, tensor in batch.items()}
        masks.clear()
        masks.update(masks_of(batch))
        try:
            return model(**batch)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(_refusal(model, batch, error)) from error

    def listening(stack: ExitStack) -> None:
        for name, listen in listeners.items():
            handle = model.get_submodule(name).register_forward_pre_hook(hook(name, listen), with_kwargs=True)
            stack.callback(handle.remove)

    with temporarily(model, listening, _evaluation(model)), torch.no_grad():
        yield run


def _refusal(model: nn.Module, batch: Batch, error: Exception) -> str:
    """Why a model does not run on a batch."""
    shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items() if isinstance(value, Tensor))
    context = context_of(model)
    ids = next((t for t in batch.values() if isinstance(t, Tensor) and t.ndim == 2 and not t.is_floating_point()), None)
    long = context is not None and ids is not None and ids.shape[-1] > context
    hint = f"; its context is {context} tokens: use a smaller length" if long else ""
    return f"{type(model).__name__} does not run on {shapes}: {first_line(error)}{hint}"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in eval mode, without gradients and without torch's fused encoder path, which bypasses inner modules.

    Other threads are refused.
    """
    with temporarily(model, _evaluation(model)), torch.no_grad():
        yield


def _evaluation(model: nn.Module) -> Change:
    def change(stack: ExitStack) -> None:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        slow_path(stack)

    return change


def slow_path(changes: ExitStack) -> None:
    """Disable torch's fused encoder path (global), which bypasses inner modules."""
    hold("fast path", _slow, changes)


def _slow() -> Callable[[], None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return partial(torch.backends.mha.set_fastpath_enabled, before)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Context in eval mode without gradients that restores modes, random states and buffers."""
    device = device_of(model)
    with (
        temporarily(model, partial(_keep_buffers, model)),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        evaluating(model),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def _keep_buffers(model: nn.Module, stack: ExitStack) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                stack.callback(_put_buffer, module, name, buffer, buffer.clone(), buffer._version)


def _put_buffer(module: nn.Module, name: str, buffer: Tensor, copy: Tensor, version: int) -> None:
    module._buffers[name] = buffer
    if buffer._version != version:
        with torch.no_grad():
            buffer.copy_(copy)


def device_of(model: nn.Module) -> torch.device:
    """The device of a model."""
    return next((weight.device for weight in model.parameters()), torch.device("cpu"))


def entry(layer: Layer, side: str = "query") -> str:
    """The module whose input a layer's queries, or keys, are computed from."""
    if layer.position == "disentangled":  # its projections are also called on relative positions
        return layer.name
    roles = (side, f"{side}_down", "module", "fused")
    return next(layer.modules[role] for role in roles if role in layer.modules)


def activations(model: nn.Module, batches: Iterable[Batch], modules: Sequence[str]) -> dict[str, Float[Tensor, "n d"]]:
    """Inputs of each module on the non-padding tokens of all batches, on the CPU.

    Parameters
    ----------
    model
        The live model.
    batches
        Its inputs by name.
    modules
        Names of modules, as in `model.named_modules()`.

    Returns
    -------
    dict
        Inputs (tokens, width) by module name.

    Examples
    --------
    >>> activations(torch.nn.Linear(3, 2), [{"input": torch.ones(1, 4, 3)}], [""])[""].shape
    torch.Size([4, 3])
    """
    kept: dict[str, list[Tensor]] = {name: [] for name in modules}
    listeners = {name: _keeper(kept[name]) for name in modules}
    with watch(model, listeners) as run:
        for batch in batches:
            run(batch)
    silent = [name for name, tensors in kept.items() if not tensors]
    if silent:
        raise ValueError(f"{silent[0]} was never called: these inputs give no activations there")
    return {name: torch.cat(tensors) for name, tensors in kept.items()}


def queries_and_keys(model: nn.Module, batch: Batch, heads: Heads) -> dict[int, tuple[Tensor, Tensor]]:
    """Queries (heads, n, r) and keys of every self-attention layer before RoPE, for non-padding tokens.

    Parameters
    ----------
    model
        The live model.
    batch
        Its inputs by name.
    heads
        The heads of that model, from `kq.read`.

    Returns
    -------
    dict
        Queries and keys by the index of the layer.
    """
    layers = [layer for layer in heads if layer.on_data]
    entered = activations(model, [batch], sorted({entry(layer) for layer in layers}))
    out = {}
    for layer in layers:
        query, key = layer.project(entered[entry(layer)].float())
        out[layer.index] = (query.flatten(0, 1), key.expand_as(query).flatten(0, 1))
    return out


def _keeper(kept: list[Tensor]) -> Callable[[Tensor], None]:
    return lambda tokens: kept.append(tokens.cpu())


def on_forward(model: nn.Module, changes: ExitStack, after: Callable[[], None]) -> None:
    """Call a function after every forward of a model that did not fail."""

    def ended(module: nn.Module, args: Any, out: Any) -> None:
        after()

    changes.callback(model.register_forward_hook(Bound(ended)).remove)


def on_input(module: nn.Module, note: Callable[..., None], changes: ExitStack) -> None:
    """Call a function with a module, and its arguments, before each of its calls."""
    changes.callback(module.register_forward_pre_hook(Bound(note), with_kwargs=True).remove)


def on_output(module: nn.Module, note: Callable[..., None], changes: ExitStack) -> None:
    """Call a function with a module, its arguments and its output, after each of its calls."""
    changes.callback(module.register_forward_hook(Bound(note), with_kwargs=True).remove)


def replace_method(module: nn.Module, name: str, function: Callable[..., Any], changes: ExitStack) -> None:
    """Let a module's method, such as its forward, be another function."""
    methods = vars(module)
    if name in methods:
        changes.callback(methods.__setitem__, name, methods[name])
    else:
        changes.callback(methods.pop, name, None)
    methods[name] = Bound(function)


def around_calls(model: nn.Module, around: Callable[..., Any], changes: ExitStack) -> None:
    """Let `around(call, *args, **kwargs)` stand in for calls of a model; it calls `call(*args, **kwargs)` itself.

    The forward has not begun then, unlike in a hook: listeners can still be added, and a `with` block spans it.
    """
    surrounded = vars(model).get(CALL)
    if not isinstance(surrounded, Surrounded):
        surrounded = vars(model)[CALL] = Surrounded(model._call_impl, surrounded)
    surrounded.functions.append(around)
    changes.callback(_leave, model, surrounded, around)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch compiles a model or a part of it. By the modules' dicts: torch's own walk is slow."""
    modules = [model]
    while modules:
        facts = vars(modules.pop())
        call, children = facts.get(CALL), facts["_modules"]
        if "_orig_mod" in children or getattr(call, "compiled", call) is not None:
            return True
        modules += [child for child in children.values() if child is not None]
    return False


CALL = "_compiled_call_impl"  # what torch calls in place of a module's `_call_impl`; model.compile() sets it, too


def _leave(model: nn.Module, surrounded: Surrounded, around: Callable[..., Any]) -> None:
    surrounded.functions.remove(around)
    if not surrounded.functions and vars(model).get(CALL) is surrounded:  # else the model was compiled meanwhile
        del vars(model)[CALL]
        if surrounded.compiled is not None:
            vars(model)[CALL] = surrounded.compiled


class Surrounded:
    """Stands in for a model's call, with functions around it. A copy of the model, or a pickled one, is without it."""

    def __init__(self, call: Callable[..., Any], compiled: Callable[..., Any] | None) -> None:
        self.compiled, self.call = compiled, call if compiled is None else compiled
        self.functions: list[Callable[..., Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; in a graph that torch compiles of it, without the functions."""
        call = self.call
        if not torch.compiler.is_compiling():
            for function in self.functions:
                call = partial(function, call)
        return call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()
