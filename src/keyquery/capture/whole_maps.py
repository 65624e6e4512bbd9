"""Whole attention maps of transformers models, and of models built of `kq.Attention`."""

from __future__ import annotations

from contextlib import ExitStack
from inspect import signature
from threading import get_ident
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from keyquery.capture.guard import put_back, temporarily
from keyquery.capture.hooks import Batch, watch
from keyquery.checkpoints.sources import bare
from keyquery.layers import Attention

Maps = tuple[Float[Tensor, "batch heads n m"], ...]


def attention_maps(model: Any, batch: Batch) -> Maps:
    """The attention maps of a model on a batch, one tensor per layer.

    Transformers models use eager attention during the run, since fused kernels return no maps, and are restored. Layers
    of `kq.Attention` are listed in the order they are called.

    Parameters
    ----------
    model
        A model of transformers, or modules with layers of `kq.Attention`.
    batch
        Its inputs by name.

    Returns
    -------
    Maps
        A tensor (batch, heads, queries, keys) per layer.

    Examples
    --------
    >>> attention_maps(kq.Attention(8, 2), {"x": torch.randn(1, 5, 8)})[0].shape
    torch.Size([1, 2, 5, 5])
    """
    model = bare(model) if isinstance(model, nn.Module) else model
    if hasattr(model, "set_attn_implementation"):
        return _eager(model, batch)
    if isinstance(model, nn.Module) and any(isinstance(module, Attention) for module in model.modules()):
        return _of_layers(model, batch)
    raise ValueError(
        f"{type(model).__name__} returns no attention maps: it is neither a transformers model nor has a kq.Attention"
    )


def _eager(model: Any, batch: Batch) -> Maps:
    missing = f"{type(model).__name__} returns no attention maps: it has no eager attention"
    with put_back(model), watch(model, {}) as run:
        try:
            model.set_attn_implementation("eager")
        except ValueError:
            raise ValueError(missing) from None
        out = run({**batch, "output_attentions": True})  # type: ignore[dict-item]
    maps = getattr(out, "attentions", None) or getattr(out, "encoder_attentions", None)
    if not maps or any(part is None for part in maps):
        raise ValueError(missing)
    return tuple(maps)


def _of_layers(model: nn.Module, batch: Batch) -> Maps:
    maps: list[Tensor] = []
    thread = get_ident()

    def hear(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert isinstance(module, Attention)
        if get_ident() != thread:  # another thread's run of the same model
            return
        arguments = signature(Attention.forward).bind(module, *args, **options).arguments
        if arguments.get("cache") is not None or arguments.get("offsets") is not None:
            raise ValueError("attention maps need whole sequences: cache and offsets must not be used")
        options_of_maps = {name: arguments.get(name) for name in ("mask", "positions")}
        maps.append(module.maps(arguments["x"], is_causal=bool(arguments.get("is_causal")), **options_of_maps))

    def listening(stack: ExitStack) -> None:
        for module in model.modules():
            if isinstance(module, Attention):
                stack.callback(module.register_forward_pre_hook(hear, with_kwargs=True).remove)

    with temporarily(model, listening), watch(model, {}) as run:
        run(batch)
    return tuple(maps)
