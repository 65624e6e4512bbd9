"""Queries and keys of a model's attention calls, read where they enter torch's kernels; the calls stay as they are.

A torch function mode sees `scaled_dot_product_attention`, `multi_head_attention_forward` and the softmax of eager
attention, whichever module calls them; hooks name the module. The kernel itself is called once, with its own arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from keyquery.instruments.monitor.statistics import statistics_by_tile, statistics_of_logits

SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)
HEARD = {functional.multi_head_attention_forward, functional.scaled_dot_product_attention, *SOFTMAX}
SAMPLE = 1024  # tokens of a module's input that are kept for its shares


@dataclass
class Seen:
    """What was seen of one attention module."""

    statistics: list[Tensor] = field(default_factory=list)  # (tiles, 6, heads) per call
    entries: list[Tensor] = field(default_factory=list)  # largest |entry| of queries and keys per call, (heads,)
    norms: list[Tensor] = field(default_factory=list)  # largest ‖x‖ of the module's input per call
    tokens: Tensor | None = None  # a sample of its input, (n, d)
    length: int = 0
    causal: bool = False
    dtype: torch.dtype = torch.float32
    scale: float = 1.0


class Interception(TorchFunctionMode):
    """While it is entered, attention calls of the modules of `model` are read into `seen`, by module name.

    `heads` has the number of heads of each attention module by name; if it is empty, modules that are called attention
    are heard. Hooks are on these modules alone: one on a projection would change how `kq.Attention` runs. An
    exception in the reading does not reach the model: the first is kept in `error`.

    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with Interception(layer, {"": 2}) as interception:
    ...     _ = layer(*[torch.randn(1, 5, 8)] * 3)
    >>> interception.seen[""].statistics[0].shape
    torch.Size([1, 6, 2])
    """

    def __init__(self, model: nn.Module, heads: Mapping[str, int], keep_tokens: bool = False) -> None:
        super().__init__()
        self.model, self.heads, self.keep_tokens = model, heads, keep_tokens
        self.seen: dict[str, Seen] = {}
        self.error: Exception | None = None
        self._running: list[tuple[str, nn.Module]] = []  # attention modules whose forward is running, innermost last
        self._hooks: ExitStack | None = None
        self._inside = False

    def __enter__(self) -> Interception:
        self._hooks = ExitStack()
        for name, module in self._modules():
            begin = module.register_forward_pre_hook(partial(self.begin, name), with_kwargs=True, prepend=True)
            end = module.register_forward_hook(self._end, always_call=True)
            self._hooks.callback(begin.remove)
            self._hooks.callback(end.remove)
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
        if self._hooks is not None:
            self._hooks.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in HEARD or self._inside:  # first: some hundred calls per forward end here
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            with self._inner_calls():
                return func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            self._safely(self._fused, *args, **kwargs)
        elif func in SOFTMAX:
            self._safely(self._eager, *args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def _inner_calls(self) -> Iterator[None]:
        """torch's own multi-head attention, which is one call to the mode: its two inner calls are read."""
        fused, softmax = functional.scaled_dot_product_attention, functional.softmax

        def heard_fused(*args: Any, **kwargs: Any) -> Any:
            self._safely(self._fused, *args, **kwargs)
            return fused(*args, **kwargs)

        def heard_softmax(*args: Any, **kwargs: Any) -> Any:
            self._safely(self._eager, *args, **kwargs)
            return softmax(*args, **kwargs)

        with patch.multiple(functional, scaled_dot_product_attention=heard_fused, softmax=heard_softmax):
            yield

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
        query, key = (t.detach().reshape((1,) * (4 - t.ndim) + tuple(t.shape)) for t in (query, key))
        if attn_mask is not None and type(attn_mask) is not Tensor:
            attn_mask = attn_mask._materialize(query.device)  # torch's lazy causal masks
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        with torch.autocast(device, enabled=False):
            found = statistics_by_tile(query, key, scale, attn_mask, is_causal)
            entries, of_keys = (torch.linalg.vector_norm(each, torch.inf, (0, 2, 3)) for each in (query, key))
            shared = query.shape[1] // key.shape[1]
            entries = torch.maximum(entries, of_keys.repeat_interleave(shared) if shared > 1 else of_keys)
        self._note(found, entries, query.dtype, scale, is_causal or attn_mask is not None, key.shape[-2])

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
        self._note(found, None, logits.dtype, 1.0, True, logits.shape[-1])

    def _note(
        self, found: Tensor, entries: Tensor | None, dtype: torch.dtype, scale: float, causal: bool, length: int
    ) -> None:
        name, _ = self._running[-1]
        seen = self.seen.setdefault(name, Seen())
        seen.statistics.append(found)
        if entries is not None:
            seen.entries.append(entries)
        seen.dtype, seen.scale, seen.causal, seen.length = dtype, scale, causal, length

    def begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The forward of an attention module begins: torch functions are heard until it ends."""
        self._running.append((name, module))
        self._safely(self._input, name, module, args, kwargs)
        super().__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *_: Any) -> None:
        if self._running:
            self._running.pop()
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _input(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The largest norm of a token of a module's input; of several inputs, as of cross-attention, of all."""
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point()]
        width = given[0].shape[-1] if given else 0
        tokens = [each.detach() for each in given if each.ndim in (2, 3) and each.shape[-1] == width]
        if not tokens:
            return
        tokens = tokens[: 2 if isinstance(module, nn.MultiheadAttention) else 1]
        seen = self.seen.setdefault(name, Seen())
        wide = torch.promote_types(tokens[0].dtype, torch.float32)
        seen.norms += [torch.linalg.vector_norm(x, dim=-1, dtype=wide).max() for x in tokens]
        if self.keep_tokens and seen.tokens is None:
            flat = tokens[0].flatten(0, -2)
            seen.tokens = flat[:: max(len(flat) // SAMPLE, 1)][:SAMPLE].float()


def looks_like_attention(module: nn.Module) -> bool:
    """Whether a module is called attention.

    >>> looks_like_attention(torch.nn.MultiheadAttention(8, 2)), looks_like_attention(torch.nn.Linear(1, 1))
    (True, False)
    """
    called = type(module).__name__.lower()
    return "attention" in called or "attn" in called
