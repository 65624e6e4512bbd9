"""Ablation of whole heads in a running model: their output is replaced by zero, or by its mean over data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.intervene.handle import Handle, check_model, lasting
from keyquery.intervene.rewrites import sites_of
from keyquery.intervene.selection import Selection, select
from keyquery.intervene.sites import Site, labels_of
from keyquery.listening import Batch, batches_of
from keyquery.listening.call import Call
from keyquery.listening.exclusive import Changes
from keyquery.listening.hooks import running
from keyquery.listening.listen import add_listener, listen
from keyquery.listening.parts.pairs import require_called
from keyquery.support.checks import check_choice

KINDS = ("zero", "mean")


def ablate_heads(
    model: nn.Module,
    kind: str = "zero",
    heads: Selection = None,
    *,
    data: Iterable[Batch] | None = None,
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

    Returns
    -------
    Handle
        A context manager, or a handle with `.undo()`.

    Raises
    ------
    ValueError
        If the model has active dropout, a head does not exist, or `kind="mean"` has no `data`.

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
    data = None if data is None else list(batches_of(data))
    sites = sites_of(model, next(iter(data or ()), None))
    chosen = select(heads, {index: range(site.count) for index, site in sites.items()}, labels_of(sites))
    means: Mapping[int, Tensor] = {}
    if kind == "mean":
        if data is None:
            raise ValueError('kind="mean" needs data: batches for the mean')
        means = mean_outputs(model, data, {index: sites[index] for index in chosen})
    outputs = {sites[index].module: (numbers, means.get(index)) for index, numbers in chosen.items()}

    def replaced(call: Call) -> Mapping[str, Tensor] | None:
        if call.module not in outputs or call.is_cross:
            return None
        numbers, mean = outputs[call.module]
        out = call.attend({}).clone()
        out[:, numbers] = without_output(out[:, numbers], None if mean is None else mean[numbers])
        return {"output": out}

    def change(changes: Changes) -> Handle:
        add_listener(model, replaced, changes)
        return Handle(changes, "ablation of heads")

    return lasting(model, change)


def without_output(output: Float[Tensor, "batch heads n v"], mean: Float[Tensor, "heads v"] | None) -> Tensor:
    """What the output of heads is replaced by: zero, or their mean at every token."""
    return torch.zeros_like(output) if mean is None else mean.to(output)[None, :, None].expand_as(output)


def mean_outputs(
    model: nn.Module, data: Iterable[Batch], sites: Mapping[int, Site]
) -> dict[int, Float[Tensor, "heads width"]]:
    """Mean output of every head over all real tokens, by layer."""
    layers = {site.module: index for index, site in sites.items()}
    sums: dict[int, Tensor] = {}
    counts: dict[int, int] = {}

    def add(call: Call) -> None:
        if call.module in layers and not call.is_cross:
            index, out = layers[call.module], call.attend({}).double().transpose(1, 2)
            rows = out.flatten(0, 1) if call.real_queries is None else out[call.real_queries]
            sums[index] = sums.get(index, 0) + rows.sum(0)
            counts[index] = counts.get(index, 0) + len(rows)

    with running(model) as run, listen(model, add):
        for batch in batches_of(data):
            run(batch)
    require_called(sites.values(), sums)
    return {index: total / counts[index] for index, total in sums.items()}
