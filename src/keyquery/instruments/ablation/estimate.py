"""The cost of changes of heads, estimated for all heads and changes at once from a few backward passes.

With dz the exact change of a head's output and g the gradient of a sequence's summed loss with respect to it,

    cost ≈ Σₜ gₜ·dzₜ + ½ E (Σₜ g̃ₜ·dzₜ)²          per sequence, over its number of labels.

g̃ is the gradient for labels that are sampled from the model: the expectation, over K samples, is the Gauss–Newton form
of the loss. Changes of several heads add up before the square. Without a loss (`losses.OUTPUT`) g̃ is that of random
projections of the output: the second term is then half of, and counted twice as, the expected squared change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.instruments.ablation.changes import Cell, Change, HeadCall, Trial
from keyquery.instruments.ablation.losses import (
    Loss,
    Objective,
    checked,
    labelled,
    output_of,
    predictions,
    real_outputs,
)
from keyquery.intervene.dial.means import SiteMeans
from keyquery.intervene.sites import Site
from keyquery.listening import Batch
from keyquery.listening.call import Call
from keyquery.listening.exclusive import temporarily
from keyquery.listening.hooks import evaluating
from keyquery.listening.listen import add_listener
from keyquery.support.printable import first_line

TOKENS = {"cuda": 8192, "cpu": 1024}  # of a run, whose logits and gradients are all kept
MAP = {"cuda": 2**28, "cpu": 2**22}  # entries of the attention maps that are changed at once


class Seen(NamedTuple):
    """An attention call of a run, and its output, which gradients are of."""

    site: Site
    call: Call
    output: Tensor


class Gradients(NamedTuple):
    """Gradients with respect to the outputs of calls: of the loss (0 without one), then of each sample."""

    of: list[list[Tensor]]
    counts: Float[Tensor, " batch"]  # labels of each sequence
    losses: Float[Tensor, " batch"]  # mean loss of each sequence


@dataclass(frozen=True)
class Estimates:
    """g·dz of the loss, then of each sample, by change and cell, of the sequences that have a loss."""

    terms: Mapping[tuple[str, Cell], Float[Tensor, "terms sequences"]]
    counts: Float[Tensor, " sequences"]
    losses: Float[Tensor, " sequences"]

    def of(self, trial: Trial) -> tuple[Float[Tensor, " sequences"], Float[Tensor, " sequences"]]:
        """First and second term of the cost of a trial, per label."""
        first, *products = torch.stack([self.terms[trial.change.name, cell] for cell in trial.cells]).sum(0)
        second = torch.stack(products).square().mean(0) / 2 if products else torch.zeros_like(first)
        return first / self.counts, second / self.counts


def estimate(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    trials: Sequence[Trial],
    sites: Mapping[int, Site],
    means: Mapping[int, SiteMeans],
    samples: int = 4,
) -> Estimates:
    """Both terms of the cost of trials, with means by site where their changes need them."""
    if any(weight.is_inference() for weight in model.parameters()):
        raise NoGradient("the weights were made in inference mode, and an estimate needs gradients: measure all")
    terms = _Terms(trials, means)
    seeds = count()  # one per sequence, so that its draws do not depend on batches and padding
    for batch in batches:
        for inputs, labels in _parts(model, loss, batch):
            with _recorded(model, [sites[index] for index in terms.wanted]) as seen:
                gradients = _gradients(model, loss, inputs, labels, seen, samples, seeds)
            terms.add(seen, gradients)
    return terms.estimates()


def _parts(model: nn.Module, loss: Loss, batch: Batch) -> Iterator[tuple[Batch, Tensor | None]]:
    """Inputs and labels of some sequences at a time."""
    inputs, labels = loss.task(model, batch) if isinstance(loss, Objective) else (batch, None)
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    rows = len(next(iter(tensors.values())))
    tokens = max((x.numel() for x in tensors.values() if x.ndim == 2), default=rows)
    size = max(TOKENS.get(next(model.parameters()).device.type, TOKENS["cpu"]) * rows // max(tokens, 1), 1)
    if rows <= size or any(x.ndim == 0 or len(x) != rows for x in tensors.values()):
        yield inputs, labels
        return
    for start in range(0, rows, size):
        part = slice(start, start + size)
        some = {name: x[part] if name in tensors else x for name, x in inputs.items()}
        yield some, None if labels is None else labels[part]


class NoGradient(ValueError):  # noqa: N818
    """A model, or a loss, that cannot be differentiated."""


@contextmanager
def _recorded(model: nn.Module, sites: Iterable[Site]) -> Iterator[list[Seen]]:
    """Context in which the model runs for gradients of head outputs alone; what its calls showed."""
    by_module = {site.module: site for site in sites}
    seen: list[Seen] = []

    def record(call: Call) -> Mapping[str, Tensor] | None:
        site = by_module.get(call.module)
        if site is None or call.is_cross:
            return None
        output = call.attend({})
        if not output.requires_grad:  # the lowest layer: weights have no gradients here
            output = output.detach().requires_grad_()
        seen.append(Seen(site, call.detached(), output))
        return {"output": output}

    def frozen(changes: ExitStack) -> None:
        for weight in model.parameters():
            if weight.requires_grad:
                changes.callback(weight.requires_grad_, True)
                weight.requires_grad_(False)
        add_listener(model, record, changes)

    with evaluating(model), temporarily(model, frozen), torch.inference_mode(False), torch.enable_grad():
        yield seen


def _gradients(
    model: nn.Module,
    loss: Loss,
    inputs: Batch,
    labels: Tensor | None,
    seen: list[Seen],
    samples: int,
    seeds: Iterator[int],
) -> Gradients:
    if not isinstance(loss, Objective):
        return _of_losses(loss(model, inputs), seen)
    if labels is None:
        return _of_output(output_of(model, inputs), inputs, seen, samples, seeds)
    predicted, targets, rows = labelled(predictions(model, inputs, labels), labels)
    counts = torch.bincount(rows, minlength=len(labels)).double()
    with torch.no_grad():
        by_label = cross_entropy(predicted, targets, reduction="none").double()
        losses = torch.zeros_like(counts).index_add_(0, rows, by_label) / counts
        share = predicted.softmax(-1)
    drawn = _drawn(share, _uniform(seeds, counts.long().tolist(), samples))
    gradients = [
        _backward(predicted, _residuals(share, labels), seen, last=number == samples)
        for number, labels in enumerate((targets, *drawn))
    ]
    return Gradients(gradients, counts, losses)


def _uniform(seeds: Iterator[int], counts: Sequence[int], *shape: int) -> Float64[Tensor, "sum *shape"]:
    """So many rows in [0, 1) for each of the next sequences."""
    sources = ((size, torch.Generator().manual_seed(seed)) for size, seed in zip(counts, seeds, strict=False))
    return torch.cat([torch.rand(size, *shape, generator=source, dtype=torch.float64) for size, source in sources])


def _drawn(share: Float[Tensor, "t v"], draws: Float[Tensor, "t samples"]) -> Int[Tensor, "samples t"]:
    """Labels drawn from the model's distribution; one cumulative sum serves all draws."""
    below = share.cumsum(-1)
    return torch.searchsorted(below, draws.to(share) * below[:, -1:]).clamp(max=share.shape[-1] - 1).mT


def _residuals(share: Float[Tensor, "t v"], labels: Int[Tensor, " t"]) -> Float[Tensor, "t v"]:
    """The gradient of the summed cross-entropy with respect to logits."""
    return share.scatter_add(1, labels[:, None], share.new_full((len(labels), 1), -1.0))


def _of_losses(losses: Any, seen: list[Seen]) -> Gradients:
    """Of a loss that labels cannot be sampled from: the first term alone."""
    losses = torch.as_tensor(losses)
    values = checked(losses)
    rows = len(seen[0].output) if seen else len(losses)
    if len(losses) != rows:
        raise NoGradient(f"an estimate needs a loss of every sequence, got {len(losses)} of {rows}: measure all")
    return Gradients([_backward(losses, torch.ones_like(losses), seen, last=True)], torch.ones_like(values), values)


def _of_output(output: Tensor, inputs: Batch, seen: list[Seen], samples: int, seeds: Iterator[int]) -> Gradients:
    """Of random signs times the output: their mean square is the squared change, as a share of the squared norm."""
    real = real_outputs(output, inputs)
    random = _uniform(seeds, real.reshape(len(real), -1).sum(1).tolist(), samples, *output.shape[real.ndim :])
    signs = torch.zeros(samples, *output.shape, device=output.device)
    signs[:, real] = torch.where(random < 0.5, -1.0, 1.0).transpose(0, 1).to(signs)
    products = [_backward(output, sign, seen, last=number == samples - 1) for number, sign in enumerate(signs)]
    norms = (output.detach() * signs[0]).double().flatten(1).square().sum(1)
    # the estimate halves the square of the products, and divides it by the count
    first = [torch.zeros_like(call.output) for call in seen]
    return Gradients([first, *products], norms / 2, torch.zeros_like(norms))


def _backward(values: Tensor, weights: Tensor, seen: list[Seen], last: bool) -> list[Tensor]:
    if not values.requires_grad:
        raise NoGradient("the loss has no gradient with respect to the attention, which an estimate needs: measure all")
    outputs = [call.output for call in seen]
    try:
        grads = torch.autograd.grad(values, outputs, weights.to(values), retain_graph=not last, allow_unused=True)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise NoGradient(f"an estimate needs gradients, which this model does not have: {first_line(error)}") from error
    return [torch.zeros_like(output) if grad is None else grad for output, grad in zip(outputs, grads, strict=True)]


class _Terms:
    """Collects g·dz over batches, of changes of heads that trials name."""

    def __init__(self, trials: Sequence[Trial], means: Mapping[int, SiteMeans]) -> None:
        self.wanted: dict[int, dict[str, tuple[Change, set[int]]]] = {}  # by site and name: the heads that change
        for trial in trials:
            for index, heads in trial.heads.items():
                changes = self.wanted.setdefault(index, {})
                changes.setdefault(trial.change.name, (trial.change, set()))[1].update(heads)
        self._means = means
        self._terms: dict[tuple[str, Cell], list[Tensor]] = {}
        self._counts: list[Tensor] = []
        self._losses: list[Tensor] = []

    @torch.no_grad()
    def add(self, seen: Sequence[Seen], gradients: Gradients) -> None:
        """Add a run; a module that is called several times has the sum of its calls."""
        kept = gradients.counts != 0
        self._counts.append(checked(gradients.counts[kept]))
        self._losses.append(checked(gradients.losses[kept]))
        totals: dict[tuple[str, Cell], Tensor] = {}
        for number, (site, call, _) in enumerate(seen):
            for key, total in self._of_call(site, call, torch.stack([grads[number] for grads in gradients.of])):
                totals[key] = totals[key] + total if key in totals else total
        for key, total in totals.items():
            self._terms.setdefault(key, []).append(total[:, kept.cpu()])

    def _of_call(
        self, site: Site, call: Call, grads: Float[Tensor, "grads batch heads n v"]
    ) -> Iterator[tuple[tuple[str, Cell], Float[Tensor, "grads batch"]]]:
        changes = self.wanted[site.index].values()
        wanted = sorted(set().union(*(heads for _, heads in changes)))
        entries = len(call.query) * call.query.shape[-2] * call.key.shape[-2]  # of a head's map
        size = max(MAP.get(call.query.device.type, MAP["cpu"]) // max(entries, 1), 1)
        for heads in _ranges(wanted, size):
            view = HeadCall(call, site, heads, self._means.get(site.index))
            for change, chosen in changes:
                if chosen.isdisjoint(heads):
                    continue
                moved = change.output(view) - view.output
                sums = torch.einsum("bhnv,gbhnv->hgb", moved, grads[:, :, view.span].to(moved)).double().cpu()
                for head, total in zip(heads, sums, strict=True):
                    if head in chosen:
                        yield (change.name, (site.index, head)), total

    def estimates(self) -> Estimates:
        """What was collected."""
        if not self._counts or not sum(map(len, self._counts)):
            raise ValueError("no sequence has a loss: one of at least two tokens is needed")
        terms = {key: torch.cat(parts, 1) for key, parts in self._terms.items()}
        return Estimates(terms, torch.cat(self._counts), torch.cat(self._losses))


def _ranges(heads: Sequence[int], size: int) -> Iterator[range]:
    """Consecutive heads, at most `size` at a time."""
    start = 0
    for number in range(1, len(heads) + 1):
        if number == len(heads) or heads[number] != heads[number - 1] + 1 or number - start == size:
            yield range(heads[start], heads[number - 1] + 1)
            start = number
