"""`kq.listen`: see, and change, every attention call of a running model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from keyquery.checkpoints.sources import bare
from keyquery.listening.attachment import OnCall, add_listener, no_attention, warn_unseen
from keyquery.listening.call import Call
from keyquery.listening.exclusive import Changes
from keyquery.listening.tokens import in_backward


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
    if seen:
        warn_unseen(attachment)
    if ran and not seen:
        raise no_attention(model)
