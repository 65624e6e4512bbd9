"""Queries and keys of a model's attention calls, read where they enter torch's kernels; the calls stay as they are.

`scaled_dot_product_attention` and the softmax of eager attention are heard by their names (`named_calls`); the first
time also by a torch function mode, which hears them under any name, until it is known that it is not needed. Hooks name
the module. The kernel itself is called once, with its own arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from keyquery.instruments.monitor.named_calls import FUSED, NamedCalls
from keyquery.instruments.monitor.statistics import statistics_by_tile, statistics_of_logits

FUSED_ATTENTION = functional.scaled_dot_product_attention  # while it is heard, another function has its name
HEARD = {FUSED_ATTENTION, functional.softmax, torch.softmax, Tensor.softmax}
SAMPLE = 1024  # tokens of a module's input that are kept for its shares


@dataclass
class Seen:
    """What was seen of one attention module."""

    statistics: list[Tensor] = field(default_factory=list)  # (tiles, rows, heads) per call
    norms: list[Tensor] = field(default_factory=list)  # ‖x‖ of the tokens of the module's input, per call
    tokens: Tensor | None = None  # a sample of its input, (n, d)
    length: int = 0
    causal: bool = False
    dtype: torch.dtype = torch.float32
    scale: float | None = None  # of the scores; unknown where their softmax alone is heard


class Interception(TorchFunctionMode):
    """While it is entered, attention calls of the modules of `model` are read into `seen`, by module name.

    `heads` has the number of heads of each attention module by name; if it is empty, modules that are called attention
    are heard. Hooks are on these modules alone: one on a projection would change how `kq.Attention` runs. With
    `by_name`, calls under other names are not heard: only after a forward without `unnamed` ones. An exception in the
    reading does not reach the model: the first is kept in `error`.

    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with Interception(layer, {"": 2}) as interception:
    ...     _ = layer(*[torch.randn(1, 5, 8)] * 3)
    >>> interception.seen[""].statistics[0].shape, interception.unnamed
    (torch.Size([1, 7, 2]), False)
    """

    def __init__(
        self, model: nn.Module, heads: Mapping[str, int], keep_tokens: bool = False, by_name: bool = False
    ) -> None:
        super().__init__()
        self.model, self.heads, self.keep_tokens, self.by_name = model, heads, keep_tokens, by_name
        self.seen: dict[str, Seen] = {}
        self.begun: set[str] = set()  # modules whose forward ran
        self.unnamed = False  # whether a call was heard by the mode alone
        self.error: Exception | None = None
        self._running: list[tuple[str, nn.Module]] = []  # attention modules whose forward is running, innermost last
        self._hooks = ExitStack()
        self._modes = 0  # function modes of others, around this one
        self._inside = False

    def __enter__(self) -> Interception:
        for name, module in self._modules():
            begin = module.register_forward_pre_hook(partial(self.begin, name), with_kwargs=True, prepend=True)
            end = module.register_forward_hook(self._end, always_call=True)
            self._hooks.callback(begin.remove)
            self._hooks.callback(end.remove)
        self._modes = _modes_of_others()
        self._hooks.enter_context(NamedCalls(self))
        return self

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The attention modules. Known names are looked up: walking a large model takes milliseconds."""
        if not self.heads:
            yield from ((name, each) for name, each in self.model.named_modules() if looks_like_attention(each))
        for name in self.heads:
            with suppress(AttributeError):
                yield name, self.model.get_submodule(name)

    def __exit__(self, *error: Any) -> None:
        while self._running:
            self._end()
        self._hooks.close()

    def called(self, name: str, args: Any, kwargs: Any) -> None:
        """Attention is called by its name. Modes of others may change its arguments first: those calls are unnamed."""
        if self._running and not self._inside and _modes_of_others() <= self._modes:
            self._read(name == FUSED, args, kwargs)
            self._inside = True

    def returned(self) -> None:
        """The call that was heard by its name is over."""
        self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in HEARD or self._inside:  # first: a hundred calls per layer end here
            return func(*args, **kwargs) if kwargs else func(*args)
        self.unnamed = True
        kwargs = kwargs or {}
        self._read(func is FUSED_ATTENTION, args, kwargs)
        self._inside = True  # functional.softmax calls Tensor.softmax
        try:
            return func(*args, **kwargs)
        finally:
            self._inside = False

    def _read(self, fused: bool, args: Any, kwargs: Any) -> None:
        self._safely(self._fused if fused else self._eager, *args, **kwargs)

    def _safely(self, read: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._inside = True
        try:
            with torch.no_grad():
                read(*args, **kwargs)
        except Exception as error:  # training goes on
            self.error = self.error or error
        finally:
            self._inside = False

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        device = query.device.type
        if torch.is_autocast_enabled(device):  # as the kernel rounds them
            short = torch.get_autocast_dtype(device)
            query, key = query.to(short), key.to(short)
        if query.ndim != 4:
            query, key = (t.reshape((1,) * (4 - t.ndim) + tuple(t.shape)) for t in (query, key))
        if attn_mask is not None and type(attn_mask) is not Tensor:
            attn_mask = attn_mask._materialize(query.device)  # torch's lazy causal masks
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        found = statistics_by_tile(query, key, scale, attn_mask, is_causal)
        self._note(found, query.dtype, scale, is_causal or attn_mask is not None, key.shape[-2])

    def _eager(self, input: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> None:
        name, _ = self._running[-1]
        dim = kwargs.get("dim", dim)
        if input.ndim not in (3, 4) or dim not in (-1, input.ndim - 1):
            return
        logits = input.detach()
        heads = self.heads.get(name)
        if logits.ndim == 3:
            if heads is None or len(logits) % heads:
                return
            logits = logits.unflatten(0, (-1, heads))
        elif heads is not None and logits.shape[1] != heads:
            return
        with torch.autocast(logits.device.type, enabled=False):
            found = statistics_of_logits(logits).unsqueeze(0)
        self._note(found, logits.dtype, None, True, logits.shape[-1])

    def _note(self, found: Tensor, dtype: torch.dtype, scale: float | None, causal: bool, length: int) -> None:
        name, _ = self._running[-1]
        seen = self.seen.setdefault(name, Seen())
        seen.statistics.append(found)
        seen.dtype, seen.scale, seen.causal, seen.length = dtype, scale, causal, length

    def begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The forward of an attention module begins: torch functions are heard until it ends."""
        self._running.append((name, module))
        self.begun.add(name)
        self._safely(self._input, name, module, args, kwargs)
        if not self.by_name:
            super().__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *_: Any) -> None:
        if self._running:
            self._running.pop()
            if not self.by_name:
                super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _input(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The norms of the tokens of a module's input; of several inputs, as of cross-attention, of all."""
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point()]
        width = given[0].shape[-1] if given else 0
        tokens = [each for each in given if each.ndim in (2, 3) and each.shape[-1] == width]
        if not tokens:
            return
        tokens = tokens[: 2 if isinstance(module, nn.MultiheadAttention) else 1]
        seen = self.seen.setdefault(name, Seen())
        wide = torch.float64 if tokens[0].dtype == torch.float64 else torch.float32
        seen.norms += [torch.linalg.vector_norm(x, dim=-1, dtype=wide) for x in tokens]
        if self.keep_tokens and seen.tokens is None:
            flat = tokens[0].flatten(0, -2)
            seen.tokens = flat[:: max(len(flat) // SAMPLE, 1)][:SAMPLE].float()


def _modes_of_others() -> int:
    """The number of torch function modes that are on, without those of monitors."""
    if not torch._C._len_torch_function_stack():
        return 0
    modes = torch.overrides._get_current_function_mode_stack()
    return sum(not isinstance(mode, Interception) for mode in modes)


def looks_like_attention(module: nn.Module) -> bool:
    """Whether a module is called attention.

    >>> looks_like_attention(torch.nn.MultiheadAttention(8, 2)), looks_like_attention(torch.nn.Linear(1, 1))
    (True, False)
    """
    called = type(module).__name__.lower()
    return "attention" in called or "attn" in called
