"""Attention through transformers' interface: the table in which modules look up their attention function is wrapped.

The model keeps its implementation, with its name and masks, since only that handles its sinks and soft caps. Fused
attention stays fused, also over replaced queries and keys of another width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.layers.fused import as_wide
from keyquery.listening.attachment import Facts, emit
from keyquery.listening.exclusive import hold
from keyquery.listening.tokens import Bound
from keyquery.listening.transformers_attention import TABLE, Ungrouped, unwrapped
from keyquery.support.extras import optional
from keyquery.support.printable import first_line

SUMMED = ("sdpa_attention_forward", "eager_attention_forward")  # take queries wider than values as they are


def attach(module: nn.Module, changes: ExitStack) -> None:
    """Make a module's lookup of its attention function return ours, which calls the original."""
    names = unwrapped(module).__globals__
    names = names if TABLE in names else vars(optional("transformers.modeling_utils", "its attention"))
    hold(("interface", id(names)), partial(_replace, names), changes)  # models may share an architecture


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
    facts = partial(_facts, inner, name, eager, module, query, key, value, attention_mask, rest)
    with emit(module, facts) as (call, new):
        if not new:
            return inner(module, query, key, value, attention_mask, **rest)
        if "output" in new or "scores" in new or ("bias" in new and not _takes_bias(inner, eager)):
            out = call.attend(new, rest.get("dropout", 0.0))
            return out.transpose(1, 2).contiguous(), call.replaced(new).weights() if "scores" in new else None
        changed = call.replaced(new)
        if "bias" in new:
            attention_mask, rest = _biased(changed, rest)
        return _widened(inner, name, eager, module, changed, attention_mask, rest)


def _facts(
    inner: Any,
    name: Any,
    eager: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    rest: Mapping[str, Any],
) -> Facts:
    causal = rest.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    n, m, offset = query.shape[-2], key.shape[-2], None
    if isinstance(mask, Tensor) and mask.ndim == 2:  # flash attention: padding, aligned to the last key
        mask, offset = mask.bool()[:, None, None], m - n if causal else None
    elif mask is None and inner is not eager and causal and n > 1:
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


def _widened(inner: Any, name: Any, eager: Any, module: nn.Module, call: Any, mask: Any, rest: dict[str, Any]) -> Any:
    """The module's own attention over replaced queries and keys, which may be wider than its values."""
    query, key = call.query, call.keys()
    value = call.value.repeat_interleave(call.heads // call.value.shape[1], 1)
    rest = {**rest, "scaling": call.scale}

    def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return inner(Ungrouped(module), query, key, value, mask, **rest)  # by position, as transformers does

    width, narrow = query.shape[-1], value.shape[-1]
    known = _takes_bias(inner, eager)
    if not known and width != narrow:
        _check_padding(run, call, name, (query, key, value), width)
    if inner is not eager and width > narrow:
        value = as_wide(value, width) if known else _padded(value, width)
    out, weights = run(query, key, value)
    return out[..., :narrow], weights


def _biased(call: Any, rest: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The mask, and other arguments, of an attention function with a replaced bias."""
    bias, lowest = call.position_bias.to(call.query), torch.finfo(call.query.dtype).min
    if rest.get("position_bias") is not None:
        shown = torch.zeros_like(bias) if call.mask is None else torch.zeros_like(bias).masked_fill(~call.mask, lowest)
        return shown, {**rest, "position_bias": bias}
    return bias if call.mask is None else bias.masked_fill(~call.mask, lowest), dict(rest)


def _takes_bias(inner: Any, eager: Any) -> bool:
    """Whether an attention function adds its mask to the scores of each head; FlexAttention's reads that of one."""
    return inner is eager or getattr(inner, "__name__", "") in SUMMED


def _padded(x: Tensor, width: int) -> Tensor:
    return nn.functional.pad(x, (0, max(width - x.shape[-1], 0)))


@torch.no_grad()
def _check_padding(run: Any, call: Any, name: Any, like: tuple[Tensor, Tensor, Tensor], width: int) -> None:
    """Raise if a custom function's result changes when queries and keys are zero-padded to a larger width.

    For example, if it derives the scale of the scores from the width. Tested on random inputs with large scores.
    """
    source = torch.Generator().manual_seed(0)
    narrow = like[2].shape[-1]
    query, key, value = (torch.randn(*t.shape[:-1], narrow, generator=source).to(t) for t in like)
    query = query * (4 / (call.scale * narrow**0.5))
    advice = f'{call.name} uses attention {name!r}, %s: call model.set_attn_implementation("eager") first'
    try:
        plain = run(query, key, value)[0]
        wide = run(*(_padded(t, width) for t in (query, key, value)))[0][..., :narrow]
    except Exception as error:  # a custom function or kernel may raise anything
        raise ValueError(advice % f"which does not take queries of width {width} ({first_line(error)})") from error
    near = torch.finfo(plain.dtype).eps ** 0.5 * plain.abs().max()
    if plain.shape != wide.shape or not bool(((plain - wide).abs() <= near).all()):
        raise ValueError(advice % "whose result changes with the width of queries and keys")
