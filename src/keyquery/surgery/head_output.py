"""Ablation of whole heads in a running model: their output is replaced by zero, or by its mean over data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.capture import Batch, activations, batches_of
from keyquery.capture.guard import claim
from keyquery.layers import Attention
from keyquery.support.checks import check_choice
from keyquery.surgery.handle import Handle, check_model, lasting
from keyquery.surgery.rewriting.attach import sites_of
from keyquery.surgery.rewriting.sites import Site, labels_of
from keyquery.surgery.selection import Selection, select

KINDS = ("zero", "mean")


def ablate_heads(
    model: nn.Module,
    kind: str = "zero",
    heads: Selection = None,
    *,
    data: Iterable[Batch] | None = None,
    means: Mapping[int, Tensor] | None = None,
) -> Handle:
    """Ablate whole heads: replace their output before the output projection by zero, or by its mean.

    Parameters
    ----------
    model
        A live model in eval mode; its weights are not modified.
    kind
        "zero", or "mean": the mean over all tokens of `data`. Default: "zero".
    heads
        Pairs (layer, head), or strings such as "3.*". Default: all.
    data
        Batches for the mean. Default: none.
    means
        Means from `mean_outputs`, instead of `data`. Default: none.

    Returns
    -------
    Handle
        A context manager, or a handle with `.undo()`.

    Raises
    ------
    ValueError
        If the model has active dropout, a head does not exist, or `kind="mean"` has neither `data` nor `means`.

    Examples
    --------
    >>> model, x = kq.Encoder(8, depth=1, heads=2).eval(), torch.randn(1, 5, 8)
    >>> before = model(x)
    >>> with kq.ablate_heads(model, heads="0.1"):
    ...     ablated = model(x)
    >>> torch.equal(model(x), before), torch.equal(ablated, before)
    (True, False)

    See Also
    --------
    ablate : The change of the loss by such ablations.
    dial : Scale parts of the scores instead.
    """
    model = check_model(model)
    check_choice("kind", kind, KINDS)
    sites = sites_of(model)
    chosen = select(heads, {index: range(site.count) for index, site in sites.items()}, labels_of(sites))
    names = {index: output_name(model, sites[index]) for index in chosen}
    if kind == "zero":
        means = {index: torch.zeros(()) for index in chosen}
    elif means is None:
        if data is None:
            raise ValueError('kind="mean" needs data: batches for the mean')
        means = mean_outputs(model, data, names)
    outputs = means

    def change(changes: ExitStack) -> Handle:
        claim(model, changes)
        for index, numbers in chosen.items():
            hook = _replacing(numbers, sites[index].count, outputs[index])
            handle = model.get_submodule(names[index]).register_forward_pre_hook(hook)
            changes.callback(handle.remove)
        return Handle(changes, "the ablation of heads")

    return lasting(model, change)


def mean_outputs(
    model: nn.Module, data: Iterable[Batch], names: Mapping[int, str]
) -> dict[int, Float[Tensor, " width"]]:
    """Mean input of each output projection, by layer."""
    inputs = activations(model, batches_of(data), list(dict.fromkeys(names.values())))
    return {index: inputs[name].double().mean(0) for index, name in names.items()}


def output_name(model: nn.Module, site: Site) -> str:
    """The name of the output projection of a site."""
    modules, known = site.read().modules, dict(model.named_modules())
    name = modules.get("output")
    if isinstance(site.module, Attention):
        name = ".".join(part for part in (modules["module"], "output") if part)
    if name is None or name not in known or isinstance(site.module, nn.MultiheadAttention):
        raise ValueError(f"{site.name} has no separate output projection: its heads cannot be ablated")
    return name


def _replacing(heads: list[int], count: int, mean: Tensor) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        joined = args[0].unflatten(-1, (count, -1)).clone()
        other = mean.to(joined) if mean.ndim == 0 else mean.to(joined).unflatten(-1, (count, -1))[heads]
        joined[..., heads, :] = other
        return (joined.flatten(-2), *args[1:])

    return hook
