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
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyquery.instruments.ablation.changes import Cell, Change, HeadCall
from keyquery.instruments.ablation.losses import (
    Loss,
    Objective,
    finite,
    labelled,
    output_of,
    predictions,
    real_outputs,
)
from keyquery.intervene.dial.means import Means, SiteMeans
from keyquery.intervene.sites import Site
from keyquery.listening import Batch
from keyquery.listening.attachment import add_listener
from keyquery.listening.call import Call
from keyquery.listening.exclusive import temporarily
from keyquery.listening.hooks import evaluating
from keyquery.support.printable import first_line

TOKENS = {"cuda": 8192, "cpu": 1024}  # of a run, whose logits and gradients are all kept
SEQUENCES = 1_000_003  # of one seed, whose draws differ
MAP = {"cuda": 2**28, "cpu": 2**22}  # entries of the attention maps that are changed at once


class Seen(NamedTuple):
    """An attention call of a run, and its output, which gradients are of."""

    site: Site
    call: Call
    output: Tensor


class Draws:
    """Random numbers that depend on the sequence alone, however sequences are batched and padded."""

    def __init__(self, seed: int) -> None:
        self._seeds = count(seed * SEQUENCES)

    def uniform(self, counts: Sequence[int], *shape: int) -> Float64[Tensor, "sum *shape"]:
        """So many rows for each of the next sequences, in [0, 1)."""
        sources = (torch.Generator().manual_seed(next(self._seeds)) for _ in counts)
        rows = [
            torch.rand(size, *shape, generator=source, dtype=torch.float64)
            for size, source in zip(counts, sources, strict=True)
        ]
        return torch.cat(rows)


class Gradients(NamedTuple):
    """Gradients with respect to the outputs of calls: of the loss (None without one), then of each sample.

    `counts` are the labels of each sequence, `losses` its mean loss.
    """

    first: list[Tensor] | None
    samples: list[list[Tensor]]
    counts: Float[Tensor, " batch"]
    losses: Float[Tensor, " batch"]


@dataclass(frozen=True)
class Estimates:
    """Both terms of the cost per sequence: `first` of (change, cell), `products` g̃·dz of (change, cell) by sample.

    Sequences without a loss are left out. Terms of sets of heads are `of` several cells.
    """

    first: Mapping[tuple[str, Cell], Float[Tensor, " sequences"]]
    products: Mapping[tuple[str, Cell], Float[Tensor, "samples sequences"]]
    counts: Float[Tensor, " sequences"]
    losses: Float[Tensor, " sequences"]

    def of(self, change: str, cells: Iterable[Cell]) -> tuple[Float[Tensor, " sequences"], Float[Tensor, " sequences"]]:
        """First and second term of a set of heads that change together, per label."""
        cells = list(cells)
        first = torch.stack([self.first[change, cell] for cell in cells]).sum(0)
        products = torch.stack([self.products[change, cell] for cell in cells]).sum(0)
        second = products.square().mean(0) / 2 if len(products) else torch.zeros_like(first)
        return first / self.counts, second / self.counts


def estimate(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    changes: Sequence[Change],
    cells: Mapping[str, Mapping[int, list[int]]],
    sites: Mapping[int, Site],
    means: Means | None = None,
    samples: int = 4,
    seed: int = 0,
) -> Estimates:
    """Both terms of the cost of changes, each of some heads (`cells`, by change and site)."""
    if any(weight.is_inference() for weight in model.parameters()):
        raise NoGradient("the weights were made in inference mode, and an estimate needs gradients: measure all")
    terms = _Terms({change.name: change for change in changes}, cells, sites, means)
    draws = Draws(seed)
    for batch in batches:
        for inputs, labels in _parts(model, loss, batch):
            with _recorded(model, sites, set().union(*map(set, cells.values()))) as seen:
                gradients = _gradients(model, loss, inputs, labels, seen, samples, draws)
            terms.add(seen, gradients)
    return terms.estimates()


def _device(model: nn.Module) -> torch.device:
    return next((weight.device for weight in model.parameters()), torch.device("cpu"))


def _parts(model: nn.Module, loss: Loss, batch: Batch) -> Iterator[tuple[Batch, Tensor | None]]:
    """Inputs and labels of some sequences at a time."""
    inputs, labels = loss.task(model, batch) if isinstance(loss, Objective) else (batch, None)
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    rows = len(next(iter(tensors.values())))
    tokens = max((x.numel() for x in tensors.values() if x.ndim == 2), default=rows)
    size = max(TOKENS.get(_device(model).type, TOKENS["cpu"]) * rows // max(tokens, 1), 1)
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
def _recorded(model: nn.Module, sites: Mapping[int, Site], indices: set[int]) -> Iterator[list[Seen]]:
    """Context in which the model runs for gradients of head outputs alone; what its calls showed."""
    by_module = {sites[index].module: sites[index] for index in indices}
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
    draws: Draws,
) -> Gradients:
    if not isinstance(loss, Objective):
        return _of_losses(loss(model, inputs), inputs, seen)
    if labels is None:
        return _of_output(output_of(model, inputs), inputs, seen, samples, draws)
    predicted, targets, rows = labelled(predictions(model, inputs, labels), labels)
    counts = torch.bincount(rows, minlength=len(labels)).double()
    with torch.no_grad():
        by_label = cross_entropy(predicted, targets, reduction="none").double()
        losses = torch.zeros_like(counts).index_add_(0, rows, by_label) / counts
        share = predicted.softmax(-1)
    drawn = _drawn(share, draws.uniform(counts.long().tolist(), samples))
    first, *rest = [
        _backward(predicted, _residuals(share, labels), seen, last=number == samples)
        for number, labels in enumerate((targets, *drawn))
    ]
    return Gradients(first, rest, counts, losses)


def _drawn(share: Float[Tensor, "t v"], draws: Float[Tensor, "t samples"]) -> Int[Tensor, "samples t"]:
    """Labels drawn from the model's distribution; one cumulative sum serves all draws."""
    below = share.cumsum(-1)
    return torch.searchsorted(below, draws.to(share) * below[:, -1:]).clamp(max=share.shape[-1] - 1).mT


def _residuals(share: Float[Tensor, "t v"], labels: Int[Tensor, " t"]) -> Float[Tensor, "t v"]:
    """The gradient of the summed cross-entropy with respect to logits."""
    return share.scatter_add(1, labels[:, None], share.new_full((len(labels), 1), -1.0))


def _of_losses(losses: Tensor, inputs: Batch, seen: list[Seen]) -> Gradients:
    """Of a loss that labels cannot be sampled from: the first term alone."""
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        shape = tuple(getattr(losses, "shape", ()))
        raise ValueError(f"loss must return one value per sequence, (batch,), got {shape}")
    finite(losses.detach())
    rows = len(seen[0].output) if seen else len(losses)
    if len(losses) != rows:
        raise NoGradient(f"an estimate needs a loss of every sequence, got {len(losses)} of {rows}: measure all")
    first = _backward(losses, torch.ones_like(losses), seen, last=True)
    return Gradients(first, [], losses.new_ones(rows, dtype=torch.float64), losses.detach().double())


def _of_output(output: Tensor, inputs: Batch, seen: list[Seen], samples: int, draws: Draws) -> Gradients:
    """Of random signs times the output: their mean square is the squared change, as a share of the squared norm."""
    real = real_outputs(output, inputs)
    random = draws.uniform(real.reshape(len(real), -1).sum(1).tolist(), samples, *output.shape[real.ndim :])
    signs = torch.zeros(samples, *output.shape, device=output.device)
    signs[:, real] = torch.where(random < 0.5, -1.0, 1.0).transpose(0, 1).to(signs)
    products = [_backward(output, sign, seen, last=number == samples - 1) for number, sign in enumerate(signs)]
    norms = (output.detach() * signs[0]).double().flatten(1).square().sum(1)
    # the estimate halves the square of the products, and divides it by the count
    return Gradients(None, products, norms / 2, torch.zeros_like(norms))


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


@dataclass
class _Terms:
    """Collects g·dz over batches."""

    changes: Mapping[str, Change]
    cells: Mapping[str, Mapping[int, list[int]]]
    sites: Mapping[int, Site]
    means: Means | None
    first: dict[tuple[str, Cell], list[Tensor]] = field(default_factory=dict)
    products: dict[tuple[str, Cell], list[Tensor]] = field(default_factory=dict)
    counts: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    _means: dict[int, SiteMeans | None] = field(default_factory=dict)  # by site

    @torch.no_grad()
    def add(self, seen: Sequence[Seen], gradients: Gradients) -> None:
        """Add a run; a module that is called several times has the sum of its calls."""
        counts, losses = gradients.counts.cpu(), gradients.losses.cpu()
        kept = counts != 0
        self.counts.append(finite(counts[kept]))
        self.losses.append(finite(losses[kept]))
        totals: dict[tuple[str, Cell], Tensor] = {}
        for number, (site, call, _) in enumerate(seen):
            grads = [each[number] for each in ([gradients.first] if gradients.first else []) + gradients.samples]
            for key, total in self._of_call(site, call, torch.stack(grads)):
                totals[key] = totals[key] + total if key in totals else total
        for key, total in totals.items():
            total = total[:, kept]
            first, rest = (total[0], total[1:]) if gradients.first else (torch.zeros_like(total[0]), total)
            self.first.setdefault(key, []).append(first)
            self.products.setdefault(key, []).append(rest)

    def _of_call(
        self, site: Site, call: Call, grads: Float[Tensor, "grads batch heads n v"]
    ) -> Iterator[tuple[tuple[str, Cell], Float[Tensor, "grads batch"]]]:
        if site.index not in self._means:
            self._means[site.index] = None if self.means is None else self.means.of(site)
        means = self._means[site.index]
        wanted = sorted({head for cells in self.cells.values() for head in cells.get(site.index, ())})
        for heads in _ranges(wanted, _fitting(call)):
            view, slopes = HeadCall(call, site, heads, means), grads[:, :, heads.start : heads.stop]
            for name, change in self.changes.items():
                if not set(self.cells[name].get(site.index, ())) & set(heads):
                    continue
                moved = change(view) - view.output
                sums = torch.einsum("bhnv,gbhnv->hgb", moved, slopes.to(moved)).double().cpu()
                for head, total in zip(heads, sums, strict=True):
                    if head in self.cells[name].get(site.index, ()):
                        yield (name, (site.index, head)), total

    def estimates(self) -> Estimates:
        """What was collected."""
        if not self.counts or not sum(map(len, self.counts)):
            raise ValueError("no sequence has a loss: one of at least two tokens is needed")
        return Estimates(
            {key: torch.cat(terms) for key, terms in self.first.items()},
            {key: torch.cat(terms, 1) for key, terms in self.products.items()},
            torch.cat(self.counts),
            torch.cat(self.losses),
        )


def _fitting(call: Call) -> int:
    """How many heads are changed at once."""
    entries = len(call.query) * call.query.shape[-2] * call.key.shape[-2]
    return max(MAP.get(call.query.device.type, MAP["cpu"]) // max(entries, 1), 1)


def _ranges(heads: Sequence[int], size: int) -> Iterator[range]:
    """Consecutive heads, at most `size` at a time."""
    start = 0
    for number in range(1, len(heads) + 1):
        if number == len(heads) or heads[number] != heads[number - 1] + 1 or number - start == size:
            yield range(heads[start], heads[number - 1] + 1)
            start = number
