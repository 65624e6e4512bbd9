"""`kq.listen`: see, and change, every attention call of a running model.

One set of hooks and adapters is attached to a model while anything listens to it, for all of its listeners.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from keyquery.checkpoints.sources import bare
from keyquery.layers import Attention
from keyquery.listening.call import Call
from keyquery.listening.exclusive import Changes
from keyquery.listening.hooks import on_input
from keyquery.listening.tokens import Arguments, Run, in_backward, nested

OnCall = Callable[[Call], Mapping[str, Tensor] | None]
OnError = Callable[[Exception], None]
# Arguments of an attention module that hold another sequence, and names of modules that attend to one.
OTHERS = ("encoder_hidden_states", "key_value_states", "cross_attention_states", "context", "memory")
# What a call that one listener changed is shown with to the next model that it is part of.
KEPT = ("query", "key", "value", "given_scores", "attn_mask", "causal", "position_bias")
CROSS = ("cross", "encoder_attn", "encdec", "encoder_decoder", "multihead_attn")


@dataclass(frozen=True, eq=False)
class Facts:
    """What an adapter knows of a call; the fields are those of `Call`. `real` and `cross` where it knows them."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    scale: float | None
    attn_mask: Tensor | None = None
    causal: int | None = None
    position_bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    given_scores: Tensor | None = None
    real: Tensor | None = None
    cross: bool | None = None


class Attachment:
    """The listeners of one model, the forward that is running, and the adapters that see its attention."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.run = model, Run(model)
        self.listeners: list[OnCall] = []
        self.on_error: list[OnError] = []  # of listeners that change nothing
        self.layers: dict[str, int] = {}  # number of every attention module, by the order of first calls
        self.ran: set[str] = set()  # modules called attention, where torch functions are watched
        self.replaces = False  # whether a listener has replaced something
        self.inside = 0  # depth of attention functions that another adapter has seen
        self.changes = ExitStack()

    def attach(self) -> None:
        """Attach adapters to all attention modules; if one fails, nothing stays attached."""
        from keyquery.listening import functions, interface  # these import this module

        with ExitStack() as changes:
            modules = dict(self.model.named_modules())
            self.run.attach(modules, changes)
            seen = {name: m for name, m in modules.items() if isinstance(m, Attention) or interface.uses_interface(m)}
            for name, module in seen.items():
                on_input(module, self.run.note, changes, first=True)
                interface.attach(module, changes)
                entry = self, name
                _SEEN_BY.setdefault(module, []).append(entry)
                changes.callback(_SEEN_BY[module].remove, entry)
            functions.attach(self, modules, seen, changes)
            self.changes = changes.pop_all()

    def show(self, module: nn.Module, name: str, facts: Callable[[], Facts]) -> tuple[Any, dict[str, Tensor]]:
        """Dispatch the call that `facts` describes.

        If no listener changes anything, an error does not reach the model, and nothing is saved for gradients:
        activation checkpointing counts what a forward saves.
        """
        if in_backward() and not (self.run.frames and self.changes_calls):  # it was seen in the forward
            self.check_again(name)
            return None, {}
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.changes_calls):
                return self.dispatch(module, name, facts())
        except Exception as error:
            if self.changes_calls:
                raise
            for report in self.on_error:
                report(error)
            return None, {}

    @property
    def changes_calls(self) -> bool:
        """Whether a listener may replace what it sees."""
        return len(self.on_error) < len(self.listeners)

    def dispatch(self, module: nn.Module, name: str, facts: Facts) -> tuple[Call, dict[str, Tensor]]:
        """Show a call to all listeners, each with what those before it replaced; returns it, and what was replaced."""
        if not self.run.frames:
            raise RuntimeError(
                f"{name or 'the model'} was called outside of the model's forward: call the model itself"
            )
        if self.run.thread != get_ident():
            raise RuntimeError("the model is running in another thread: run one after the other")
        call, merged = self.call(module, name, facts), dict[str, Tensor]()
        seen, left = call, len(self.listeners)
        for listener in list(self.listeners):
            new, left = listener(seen), left - 1
            if new is not None and seen.check(new):
                merged |= new
                seen = seen.replaced(new) if left or "scores" in merged else seen
                if "scores" in merged and seen.given_scores is not None:  # with later queries, keys and bias in them
                    merged["scores"] = seen.given_scores
        self.replaces = self.replaces or bool(merged)
        return call, merged

    def check_again(self, name: str) -> None:
        """Raise if a module that computes a forward again, in the backward pass, computed it with changes."""
        if self.replaces:
            raise RuntimeError(
                f"{name} is computed again in the backward pass, where its attention cannot be changed: "
                "turn activation checkpointing off"
            )

    def call(self, module: nn.Module, name: str, facts: Facts) -> Call:
        """The call of a module, with its number and its tokens."""
        layer = self.layers.setdefault(name, len(self.layers))
        given = self.run.arguments.get(module, Arguments())
        cross = facts.cross
        if cross is None:
            named = any(word in part for part in name.lower().split(".") for word in CROSS)
            cross = named or any(other in given.tensors for other in OTHERS)
        tokens = self.run.tokens(module, name, facts.query, facts.key, cross, facts.real)
        fields = {field: value for field, value in vars(facts).items() if field not in ("real", "cross")}
        return Call(module, name, layer, tokens=tokens, is_cross=cross, cache=given.cache, **fields)


_ATTACHED: WeakKeyDictionary[nn.Module, Attachment] = WeakKeyDictionary()  # by model
_SEEN_BY: WeakKeyDictionary[nn.Module, list[tuple[Attachment, str]]] = WeakKeyDictionary()  # by attention module


def add_listener(model: nn.Module, listener: OnCall, changes: ExitStack, on_error: OnError | None = None) -> Attachment:
    """Let a function see, and change, every attention call of a model; `changes` removes it.

    With `on_error` it changes nothing, and errors go there, unless a listener that changes something is on, too.
    """
    attachment = _ATTACHED.get(model) or Attachment(model)

    def remove() -> None:
        if listener in attachment.listeners:
            attachment.listeners.remove(listener)
            attachment.replaces = False
        if on_error in attachment.on_error:
            attachment.on_error.remove(on_error)
        if not attachment.listeners and _ATTACHED.get(model) is attachment:
            del _ATTACHED[model]
            attachment.changes.close()

    changes.callback(remove)  # first: what follows may be interrupted
    if model not in _ATTACHED:
        _ATTACHED[model] = attachment
        attachment.attach()
    attachment.listeners.append(listener)
    attachment.on_error += [] if on_error is None else [on_error]
    return attachment


@contextmanager
def emit(module: nn.Module, facts: Callable[[], Facts]) -> Iterator[tuple[Any, dict[str, Tensor]]]:
    """Show a call of a module to everything that listens to a model it is part of; inside, it is not seen again."""
    entries = _SEEN_BY.get(module, ())
    first: Call | None = None
    merged: dict[str, Tensor] = {}
    for attachment, name in entries:
        call, new = attachment.show(module, name, facts)
        first = call if first is None else first
        if new:
            merged |= new
            changed = call.replaced(new)
            fields: dict[str, Any] = {name: getattr(changed, name) for name in KEPT}
            facts = partial(replace, facts(), **fields)
    for attachment, _ in entries:
        attachment.inside += 1
    try:
        yield first, merged
    finally:
        for attachment, _ in entries:
            attachment.inside -= 1


@contextmanager
def listen(model: nn.Module, on_call: OnCall | None = None) -> Iterator[list[Call]]:
    """See every attention call of a model that runs inside, and change it.

    Any PyTorch model will do: of transformers with any attention implementation, of `kq.Attention`, with
    `nn.MultiheadAttention`, or with code of one's own that calls `scaled_dot_product_attention` or a softmax over q·kᵀ.

    Parameters
    ----------
    model
        A live model. Its hooks are removed at the end.
    on_call
        Gets each `Call` as it is made, and none are kept. It may return a dict with any of `query`, `key`, `value`,
        `bias`, `scores` and `output`: the model goes on with these. Queries and keys may have another width, and
        attention stays fused if only they are replaced. Default: all calls are kept.

    Yields
    ------
    list of Call
        The calls so far, in order; empty with `on_call`.

    Raises
    ------
    ValueError
        If the model ran, and none of its attention went through torch; or if a replaced tensor does not fit.
    RuntimeError
        If two threads use the model at the same time, an attention module is called without its model, or activation
        checkpointing calls one again that was changed.

    Examples
    --------
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with kq.listen(model) as calls:
    ...     out = model(torch.randn(1, 5, 8))
    >>> calls[0]
    Call(0, self_attn: attention, 2 heads, 5 × 5 tokens)
    >>> with kq.listen(model, lambda call: {"output": 0 * call.output()}):
    ...     without = model(torch.randn(1, 5, 8))

    See Also
    --------
    dial : Scale parts of the scores.
    ablate : What parts are worth to the model.
    """
    model = bare(model)
    calls: list[Call] = []
    seen = 0

    def listener(call: Call) -> Mapping[str, Tensor] | None:
        nonlocal seen
        seen += 1
        if on_call is not None:
            return on_call(call)
        if not in_backward():  # where it is computed again
            calls.append(call)
        return None

    with Changes(model) as changes:  # which `kq.undo` closes, too
        attachment = add_listener(model, listener, changes)
        runs = attachment.run.count
        yield calls
        ran = attachment.run.count > runs
    if not ran:
        return
    if not seen:
        raise ValueError(
            f"{type(model).__name__} ran without an attention call that torch shows: it has no attention, or one in "
            "code of its own outside of torch"
        )
    for name in sorted(attachment.ran):
        if not any(nested(name, other) for other in attachment.layers):
            what = f"{name} of {type(model).__name__}"
            warnings.warn(f"{what} ran, but none of its attention went through torch: it is not seen", stacklevel=3)
            return
