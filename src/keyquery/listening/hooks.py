"""Runs of a live model, its hooks and replaced methods: the model is left unchanged."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.checkpoints import Layer
from keyquery.checkpoints.sources import bare
from keyquery.listening.exclusive import hold, temporarily
from keyquery.support.printable import first_line

Batch = Mapping[str, Tensor]
CALL = "_compiled_call_impl"  # what torch calls in place of a module's `_call_impl`; model.compile() sets it, too
POSITION_EMBEDDING = re.compile(r"wpe|places|pos\w*|emb\w*_pos\w*")


@contextmanager
def running(model: nn.Module) -> Iterator[Callable[[Batch], Any]]:
    """Context whose function runs a batch, in eval mode without gradients; the model is restored afterwards."""
    model = bare(model)

    def run(batch: Batch) -> Any:
        device = device_of(model)
        batch = {name: tensor.to(device) if isinstance(tensor, Tensor) else tensor for name, tensor in batch.items()}
        try:
            return model(**batch)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items())
            ids = [x.shape[1] for x in tensors.values() if x.ndim == 2 and not x.is_floating_point()]
            context = context_of(model)
            long = context is not None and bool(ids) and ids[0] > context
            hint = f"; its context is {context} tokens: use a smaller length" if long else ""
            raise ValueError(f"{type(model).__name__} does not run on {shapes}: {first_line(error)}{hint}") from error

    with evaluating(model):
        yield run


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in eval mode, without gradients and without torch's fused encoder path, which bypasses inner modules.

    Other threads are refused.
    """

    def change(stack: ExitStack) -> None:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        slow_path(stack)

    with temporarily(model, change), torch.no_grad():
        yield


def slow_path(changes: ExitStack) -> None:
    """Disable torch's fused encoder path (global), which bypasses inner modules."""

    def begin() -> Callable[[], None]:
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        return partial(torch.backends.mha.set_fastpath_enabled, before)

    hold("fast path", begin, changes)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Context in eval mode without gradients that restores modes, random states and buffers."""

    def keep(stack: ExitStack) -> None:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    stack.callback(restore, module, name, buffer, buffer.clone(), buffer._version)

    def restore(module: nn.Module, name: str, buffer: Tensor, copy: Tensor, version: int) -> None:
        module._buffers[name] = buffer
        if buffer._version != version:
            with torch.no_grad():
                buffer.copy_(copy)

    device = device_of(model)
    with (
        temporarily(model, keep),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        evaluating(model),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def device_of(model: nn.Module) -> torch.device:
    """The device of a model."""
    return next((weight.device for weight in model.parameters()), torch.device("cpu"))


def module_of(layer: Layer) -> str:
    """The attention module of a layer; the nope and rope parts of MLA share one."""
    return layer.name.removesuffix(" (nope)").removesuffix(" (rope)")


def entry(layer: Layer, side: str = "query") -> str:
    """The module whose input a layer's queries, or keys, are computed from."""
    if layer.position == "disentangled":  # its projections are also called on relative positions
        return layer.name
    roles = (side, f"{side}_down", "module", "fused")
    return next(layer.modules[role] for role in roles if role in layer.modules)


def batches_of(data: Iterable[Batch], name: str = "data") -> Iterator[Batch]:
    """Iterate over batches, each a mapping of tensors; raises on anything else, by the `name` of the argument."""
    for batch in [data] if isinstance(data, (Mapping, Tensor, str)) or not isinstance(data, Iterable) else data:
        if batch is data or not isinstance(batch, Mapping):
            wrong = type(batch).__name__
            raise TypeError(f"{name} must be batches: mappings of argument names to tensors, got a {wrong}")
        yield batch


def config_of(model: nn.Module) -> Any:
    """The config of a model; of a multimodal one, that of its text model."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def context_of(model: nn.Module) -> int | None:
    """The longest sequence that a model takes, by its config or its learned positions; None if neither says so."""
    for name in ("max_position_embeddings", "n_positions", "length"):
        configured = getattr(config_of(model), name, None)
        if isinstance(configured, int) and configured > 0:
            return configured
    tables = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and POSITION_EMBEDDING.fullmatch(name.rpartition(".")[2])
    ]
    return min(tables, default=None)


def has_two_sides(model: nn.Module) -> bool:
    """Whether a model is an encoder-decoder."""
    configured = getattr(getattr(model, "config", None), "is_encoder_decoder", None)
    return isinstance(model, nn.Transformer) if configured is None else bool(configured)


class Bound:
    """A function bound to one model that must not be copied: a copy would act on the original.

    Where torch's compiler is in use it is left out of graphs: the state that it reads changes from call to call.
    """

    def __init__(self, function: Any) -> None:
        self._function = torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
        self.__wrapped__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("a changed model cannot be copied: undo the change first")

    def __reduce__(self) -> Any:
        raise RuntimeError("a changed model cannot be pickled: undo the change first, or save its state_dict()")


def on_input(module: nn.Module, note: Callable[..., Any], changes: ExitStack, first: bool = False) -> None:
    """Call a function with a module and its arguments before each of its calls; `first`: before all other hooks."""
    changes.callback(module.register_forward_pre_hook(Bound(note), with_kwargs=True, prepend=first).remove)


def on_output(module: nn.Module, note: Callable[..., Any], changes: ExitStack, always: bool = False) -> None:
    """Call a function with a module, its arguments and its output after each of its calls.

    `always`: also after an error, and before all other hooks.
    """
    hook = module.register_forward_hook(Bound(note), with_kwargs=True, always_call=always, prepend=always)
    changes.callback(hook.remove)


def put(owner: Any, name: str, value: Any, changes: ExitStack) -> None:
    """Set owner.name = value, with the undo in `changes`; an instance attribute hides one of its class."""
    tables = [getattr(owner, kind, {}) for kind in ("_parameters", "_buffers", "_modules")] + [vars(owner)]
    table = next((table for table in tables if name in table), None)
    if table is None:
        changes.callback(vars(owner).pop, name, None)
        vars(owner)[name] = value
    else:
        changes.callback(table.__setitem__, name, table[name])  # keeps the order of entries
        table[name] = value


def replace_method(module: nn.Module, name: str, function: Callable[..., Any], changes: ExitStack) -> None:
    """Let a module's method, such as its forward, be another function."""
    put(module, name, Bound(function), changes)


def around_calls(model: nn.Module, around: Callable[..., Any], changes: ExitStack) -> None:
    """Let `around(call, *args, **kwargs)` stand in for calls of a model; it calls `call(*args, **kwargs)` itself.

    The forward has not begun then, unlike in a hook: listeners can still be added, and a `with` block spans it.
    """
    before = vars(model).get(CALL)
    surrounded = before if isinstance(before, Surrounded) else Surrounded(model._call_impl, before)
    vars(model)[CALL] = surrounded
    surrounded.functions.append(around)

    def leave() -> None:
        surrounded.functions.remove(around)
        if not surrounded.functions and vars(model).get(CALL) is surrounded:  # else the model was compiled meanwhile
            del vars(model)[CALL]
            if surrounded.compiled is not None:
                vars(model)[CALL] = surrounded.compiled

    changes.callback(leave)


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


class Surrounded:
    """Stands in for a model's call, with functions around it. A copy of the model, or a pickled one, is without it."""

    def __init__(self, call: Callable[..., Any], compiled: Callable[..., Any] | None) -> None:
        self.compiled, self.call = compiled, call if compiled is None else compiled
        self.functions: list[Callable[..., Any]] = []  # the outermost first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; in a graph that torch compiles of it, without the functions."""
        return self.call(*args, **kwargs) if torch.compiler.is_compiling() else self._within(0, *args, **kwargs)

    def _within(self, depth: int, *args: Any, **kwargs: Any) -> Any:
        """Call the next function, which one around it may just have added, or the model."""
        if depth == len(self.functions):
            return self.call(*args, **kwargs)
        return self.functions[depth](partial(self._within, depth + 1), *args, **kwargs)

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()
