"""Attention that asks for a function: of transformers, in whose interface it is looked up, and of `kq.Attention`.

The model keeps its implementation while nothing is replaced. Replaced tensors, which may be of another width, enter
torch's fused attention; eager attention, and what has sinks or soft caps, is computed from its parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.layers import Attention
from keyquery.listening.exclusive import hold
from keyquery.listening.hooks import Bound
from keyquery.listening.listen import Facts, emit
from keyquery.support.extras import optional

TABLE = "ALL_ATTENTION_FUNCTIONS"  # name of transformers' interface in modeling files


def uses_interface(module: nn.Module) -> bool:
    """Whether a module uses transformers' attention interface; some architectures do not."""
    names = getattr(getattr(unwrap(type(module).forward), "__code__", None), "co_names", ())
    asks = "get_interface" in names or "getattr" not in names  # getattr(TABLE, name, eager) is always eager
    return TABLE in names and asks


def attach(module: nn.Module, changes: ExitStack) -> None:
    """Let a module get a function of ours, which calls the original; models may share modules, and architectures."""
    if isinstance(module, Attention):
        hold(("layer", id(module)), partial(_set, module), changes)
        return
    names = unwrap(type(module).forward).__globals__
    names = names if TABLE in names else vars(optional("transformers.modeling_utils", "its attention"))
    hold(("interface", id(names)), partial(_replace, names), changes)


def _replace(names: dict[str, Any]) -> Callable[[], None]:
    before = names[TABLE]
    names[TABLE] = Intercepted(before)
    return partial(names.__setitem__, TABLE, before)


class Intercepted(Mapping[str, Any]):
    """Transformers' table of attention functions, each wrapped so that its calls are seen."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def get_interface(self, name: Any, default: Any) -> Any:
        """The function of an implementation; `default` is the architecture's eager one."""
        return Bound(partial(_attend, self._table.get_interface(name, default), name, default))

    def __getitem__(self, name: str) -> Any:
        return Bound(partial(_attend, self._table[name], name, None))

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


def _attend(
    inner: Any,
    name: Any,
    eager: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **rest: Any,
) -> Any:
    facts = partial(_facts, inner is eager, name, module, (query, key, value), attention_mask, rest)
    with emit(module, facts) as (call, new):
        if not new:
            return inner(module, query, key, value, attention_mask, **rest)
        # What transformers' own functions compute is what a call does.
        known = inner is eager or getattr(inner, "func", inner).__module__.startswith("transformers.")
        if "output" not in new and not known:
            raise ValueError(
                f"{call.name} uses attention {name!r}, which is not one of transformers: "
                'call model.set_attn_implementation("eager") first'
            )
        weights = None
        if "output" not in new and inner is eager:  # which returns its weights, too
            weights = call.replaced(new).weights().to(query.dtype)
        return call.attend(new, rest.get("dropout", 0.0)).transpose(1, 2).contiguous(), weights


def _facts(
    is_eager: bool, name: Any, module: Any, sides: tuple[Tensor, Tensor, Tensor], mask: Any, rest: Mapping[str, Any]
) -> Facts:
    query, key, value = sides
    causal = rest.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    n, m, offset = query.shape[-2], key.shape[-2], None
    if isinstance(mask, Tensor) and mask.ndim == 2:  # flash attention: padding, aligned to the last key
        mask, offset = mask.bool()[:, None, None], m - n if causal else None
    elif mask is None and not is_eager and causal and n > 1:
        offset = 0 if name == "sdpa" else m - n
    elif mask is not None and not isinstance(mask, Tensor):
        mask = _dense(mask, module, query, key)
    if offset is not None and rest.get("sliding_window") is not None and name != "sdpa":
        near = torch.ones(n, m, dtype=torch.bool, device=query.device).triu(offset - rest["sliding_window"] + 1)
        mask = near[None, None] if mask is None else mask & near
    scaling = rest.get("scaling")
    return Facts(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        attn_mask=mask[..., :m] if isinstance(mask, Tensor) else None,
        causal=offset,
        position_bias=rest.get("position_bias"),
        softcap=rest.get("softcap"),
        sinks=rest.get("s_aux", getattr(module, "sinks", None)),
    )


def _dense(mask: Any, module: nn.Module, query: Tensor, key: Tensor) -> Tensor | None:
    """FlexAttention's block mask as a tensor."""
    if hasattr(mask, "mask_mod"):
        from torch.nn.attention.flex_attention import create_mask  # a slow import

        shape = (len(query), query.shape[1], query.shape[-2], key.shape[-2])
        return create_mask(mask.mask_mod, *shape, device=query.device)
    warnings.warn(f"{type(module).__name__} has a mask of {type(mask).__name__}, which is not read", stacklevel=2)
    return None


def _set(module: Any) -> Any:
    vars(module)["attend_by"] = Bound(partial(_attend_layer, module))
    return partial(vars(module).pop, "attend_by", None)


def _attend_layer(module: Attention, *given: Any) -> tuple[Tensor, Tensor | None]:
    with emit(module, partial(_layer_facts, module, *given)) as (call, new):
        if not new:
            return module.attend(*given)
        out, real = call.attend(new, module.dropout if module.training else 0.0), given[3]
    if call.mask is None and real is None:
        return out, None
    # 0 for queries that see no key, and which queries see any
    shown = torch.ones(len(out), 1, *call.query.shape[-2:-1], call.key.shape[-2], dtype=torch.bool, device=out.device)
    shown = shown if call.mask is None else shown & call.mask
    seen = (shown if real is None else shown & real[:, None, None]).any(-1, keepdim=True)
    return out.where(seen, 0.0), seen


def _layer_facts(
    module: Attention, query: Tensor, key: Tensor, value: Tensor, real: Any, visible: Any, is_causal: bool
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
