"""Attention functions for transformers' attention interface, each with its mask function.

Without a mask function of the same name transformers drops the mask, the causal one too, without a word.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from keyquery.capture.interface import Ungrouped
from keyquery.extras import optional
from keyquery.layers.attend import as_wide
from keyquery.surgery.sites import Run, Site, repeated

FUSED, EAGER = "keyquery", "keyquery_eager"
# Modules whose queries and keys are rewritten; all others attend as they always do.
ACTIVE: WeakKeyDictionary[nn.Module, tuple[Site, Run]] = WeakKeyDictionary()


def register() -> str:
    """Make "keyquery" known to transformers as an attention implementation; a model that has it can be dialled.

    It is transformers' own fused attention, and "keyquery_eager" the eager one, with a place where queries and keys
    can be rewritten. `kq.dial` and `kq.project` switch to it and back, and see to it that it is really called.

    >>> kq.register()
    'keyquery'
    """
    utils, masks = (optional(f"transformers.{part}", "register") for part in ("modeling_utils", "masking_utils"))
    utils.AttentionInterface.register(FUSED, _fused)
    utils.AttentionInterface.register(EAGER, _eager)
    masks.AttentionMaskInterface.register(FUSED, masks.sdpa_mask)
    masks.AttentionMaskInterface.register(EAGER, masks.eager_mask)
    return FUSED


def _fused(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
    inner = optional("transformers.integrations.sdpa_attention", "register").sdpa_attention_forward
    return _attend(inner, module, query, key, value, mask, rest, padded=True)


def _eager(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
    inner = sys.modules[type(module).__module__].eager_attention_forward  # each family has its own
    return _attend(inner, module, query, key, value, mask, rest, padded=False)


def _attend(
    inner: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    rest: dict[str, Any],
    padded: bool,
) -> Any:
    if module not in ACTIVE or not ACTIVE[module][0].rewrites:
        return inner(module, query, key, value, mask, **rest)
    site, run = ACTIVE[module]
    if rest.get("scaling") is not None:
        query = query * (rest["scaling"] / site.scale)  # some families scale their queries themselves
    rest["scaling"] = site.scale
    key, value = (repeated(t, query.shape[1]) for t in (key, value))
    constants = rest.get("softcap") is not None or rest.get("s_aux") is not None
    places, real = run.places(query.shape[-2]), run.real(len(key), key.shape[-2], site.name)
    query, key = site.widen(query, key, places, real, constants)
    if rest.get("position_bias") is not None:
        rest["position_bias"] = rest["position_bias"] * site.bias_gains().to(query)[:, None, None]
    width = value.shape[-1]
    value = as_wide(value, query.shape[-1]) if padded else value
    out, weights = inner(Ungrouped(module), query, key, value, mask, **rest)
    return out[..., :width], weights
