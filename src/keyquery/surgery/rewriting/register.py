"""A hook between transformers' attention interface and its functions, where queries and keys can be rewritten.

The model keeps its implementation, with its name and masks, since only that handles its sinks and soft caps: what is
replaced is the table in which an architecture's modules look up their attention function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from keyquery.capture.guard import hold, uninterrupted
from keyquery.capture.transformers_attention import TABLE, Ungrouped, unwrapped
from keyquery.checkpoints.sources import first_line
from keyquery.layers.fused import as_wide
from keyquery.support.extras import optional
from keyquery.surgery.rewriting.sites import Run, Site, repeated

FUSED, EAGER = "keyquery", "keyquery_eager"
# Modules whose queries and keys are rewritten; all others are unaffected.
ACTIVE: WeakKeyDictionary[nn.Module, tuple[Site, Run]] = WeakKeyDictionary()


def register() -> str:
    """Register the attention implementations "keyquery" and "keyquery_eager" with transformers.

    They are transformers' own fused and eager attention with their masks. No intervention needs them: `kq.dial` and
    `kq.project` work with any implementation. An implementation without a mask function of the same name would get no
    mask, not even the causal one.

    Returns
    -------
    str
        The name of the fused one, "keyquery".

    Raises
    ------
    ImportError
        Without transformers (extra `hf`).

    Examples
    --------
    >>> kq.register()
    'keyquery'

    See Also
    --------
    dial, project : Interventions on attention scores.
    """
    utils, masks = (optional(f"transformers.{part}", "register") for part in ("modeling_utils", "masking_utils"))
    with uninterrupted():
        masks.AttentionMaskInterface.register(FUSED, masks.sdpa_mask)
        masks.AttentionMaskInterface.register(EAGER, masks.eager_mask)
        utils.AttentionInterface.register(FUSED, _sdpa())
        utils.AttentionInterface.register(EAGER, _eager)
    return FUSED


def _sdpa() -> Any:
    return optional("transformers.integrations.sdpa_attention", "register").sdpa_attention_forward


def _eager(module: nn.Module, *args: Any, **rest: Any) -> Any:
    return sys.modules[type(module).__module__].eager_attention_forward(
        module, *args, **rest
    )  # each architecture has its own


def intercept(module: nn.Module, changes: ExitStack) -> None:
    """Make a module's lookup of its attention function return ours, which calls the original."""
    names = unwrapped(module).__globals__
    names = names if TABLE in names else vars(optional("transformers.modeling_utils", "register"))
    hold(("interface", id(names)), partial(_replace, names), changes)  # models may share an architecture


def _replace(names: dict[str, Any]) -> Callable[[], None]:
    before = names[TABLE]
    names[TABLE] = Intercepted(before)
    return partial(names.__setitem__, TABLE, before)


def eagerly(function: Any) -> Any:
    """Exclude a function from torch.compile: the state it reads changes with every `Dial.turn`."""
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function


class Intercepted(Mapping[str, Any]):
    """Transformers' table of attention functions, each wrapped to get rewritten queries and keys."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def get_interface(self, name: Any, default: Any) -> Any:
        """The function of an implementation; `default` is the architecture's eager one."""
        return partial(eagerly(_attend), self._table.get_interface(name, default), name, default)

    def __getitem__(self, name: str) -> Any:
        return partial(eagerly(_attend), self._table[name], name, None)

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
    site, run = ACTIVE.get(module, (None, None))
    if site is None or run is None or not site.rewrites:
        return inner(module, query, key, value, attention_mask, **rest)
    scaled = query
    if rest.get("scaling") is not None and rest["scaling"] != site.scale:
        scaled = query * (rest["scaling"] / site.scale)  # some architectures scale their queries themselves
    keys, values = (repeated(t, query.shape[1]) for t in (key, value))
    known = inner is eager or inner is _sdpa()
    constants = not known or any(rest.get(constant) is not None for constant in ("softcap", "s_aux"))
    places, real = run.places(query.shape[-2]), run.real(len(key), keys.shape[-2], site.name)
    wide_query, wide_key = site.widen(scaled, keys, places, real, constants)
    bias, gains = rest.get("position_bias"), site.bias_gains()
    if wide_query is scaled and wide_key is keys and (bias is None or bool((gains == 1).all())):
        return inner(module, query, key, value, attention_mask, **rest)
    if bias is not None:
        rest["position_bias"] = bias * gains.to(query)[:, None, None]
    rest["scaling"] = site.scale

    def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return inner(Ungrouped(module), query, key, value, attention_mask, **rest)  # by position, as transformers does

    if not known and inner not in site.proven:
        _check_padding(call, site, name, (scaled, keys, values), wide_query.shape[-1])
        site.proven.add(inner)
    if inner is not eager:
        values = as_wide(values, wide_query.shape[-1]) if known else _padded(values, wide_query.shape[-1])
    out, weights = call(wide_query, wide_key, values)
    return out[..., : value.shape[-1]], weights


def _padded(x: Tensor, width: int) -> Tensor:
    return nn.functional.pad(x, (0, max(width - x.shape[-1], 0)))


@torch.no_grad()
def _check_padding(call: Any, site: Site, name: Any, like: tuple[Tensor, Tensor, Tensor], width: int) -> None:
    """Raise if a function's result changes when queries and keys are zero-padded to a larger width.

    For example, if it derives the scale of the scores from the width. Tested on random inputs with large scores.
    """
    source = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(t.shape, generator=source).to(t) for t in like)
    query = query * (4 / (site.scale * query.shape[-1] ** 0.5))
    advice = f'{site.name} uses attention {name!r}, %s: call model.set_attn_implementation("eager") first'
    try:
        plain = call(query, key, value)[0]
        wide = call(*(_padded(t, width) for t in (query, key, value)))[0][..., : value.shape[-1]]
    except Exception as error:  # a custom function or kernel may raise anything
        raise ValueError(advice % f"which does not take queries of width {width} ({first_line(error)})") from error
    near = torch.finfo(plain.dtype).eps ** 0.5 * plain.abs().max()
    if plain.shape != wide.shape or not bool(((plain - wide).abs() <= near).all()):
        raise ValueError(advice % "whose result changes with the width of queries and keys")
