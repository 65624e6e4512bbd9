"""Attention of `kq.Attention`, which asks a function where it attends."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.layers import Attention
from keyquery.listening.attachment import Facts, emit
from keyquery.listening.call import Call
from keyquery.listening.exclusive import hold
from keyquery.listening.tokens import Bound


def attach(module: nn.Module, changes: ExitStack) -> None:
    """Let a layer call `_attend` where it attends."""
    hold(("layer", id(module)), partial(_set, module), changes)  # several models may share it


def _set(module: Any) -> Any:
    vars(module)["attend_by"] = Bound(partial(_attend, module))
    return partial(vars(module).pop, "attend_by", None)


def _attend(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    visible: Tensor | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    with emit(module, partial(_facts, module, query, key, value, real, visible, is_causal)) as (call, new):
        if not new:
            return module.attend(query, key, value, real, visible, is_causal)
        return _shown(call, call.attend(new, module.dropout if module.training else 0.0), real)


def _shown(call: Call, out: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Outputs with 0 for queries that see no key, and which queries see any."""
    if call.mask is None and real is None:
        return out, None
    shown = torch.ones(len(out), 1, *call.query.shape[-2:-1], call.key.shape[-2], dtype=torch.bool, device=out.device)
    shown = shown if call.mask is None else shown & call.mask
    seen = (shown if real is None else shown & real[:, None, None]).any(-1, keepdim=True)
    return out.where(seen, 0.0), seen


def _facts(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    visible: Tensor | None,
    is_causal: bool,
) -> Facts:
    if module.kernel == "rbf":  # −‖k‖²/2 as a further key dimension, with 1 in the query
        query = torch.cat((query, torch.ones_like(query[..., :1])), -1)
        key = torch.cat((key, key.square().sum(-1, keepdim=True) / -2), -1)
    mask = visible
    if real is not None:  # NaN in padding must not reach the output
        key, value = (x.where(real[:, None, :, None], 0.0) for x in (key, value))
        mask = real[:, None, None] if visible is None else visible & real[:, None, None]
    offset = key.shape[-2] - query.shape[-2] if is_causal else None
    return Facts(query, key, value, module.scale, mask, offset, real=real, cross=False)
