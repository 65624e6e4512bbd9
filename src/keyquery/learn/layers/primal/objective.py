"""The losses of Primal-Attention, J and the reconstruction error of K, computed from p×p Gram matrices."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LOSSES = ("paper", "ksvd")
SHARE = 0.1  # weight of the KKT residual, which identifies the singular triples; the reconstruction does not
FORGOTTEN = (
    "a primal layer was called again before its regularizer() was read, which covers the last call only: read it after "
    "each call and add up, for example in a forward hook (nn.DataParallel keeps one replica only: use "
    "DistributedDataParallel)"
)


class Batch(NamedTuple):
    """Σe² and Σr² over tokens, projection weights (2, batch, heads, p, s), and the number of tokens per sample.

    `tokens` is an int if there is no padding. `rows` is the number of tokens in f(X), None for the identity; `used`
    marks those that a sample has. Gram matrices and f(X) are stored only if needed. A causal batch has no weights,
    since each token has its own.
    """

    tokens: Float[Tensor, " batch"] | int
    used: Bool[Tensor, "batch rows"] | None
    energy: Float[Tensor, "2 batch heads s"]
    weights: Float[Tensor, "2 batch heads p s"] | None = None
    grams: Float[Tensor, "2 batch heads p p"] | None = None
    sample: Float[Tensor, "batch rows heads p"] | None = None
    rows: int | None = None
    numbers: Int[Tensor, " batch"] | None = None  # indices of packed samples
    loss: Float[Tensor, ""] | None = None  # the regularizer for this eta, where one kernel computes all
    eta: float = 1.0


def mean_over_samples(batches: tuple[Batch, ...], each: list[Float[Tensor, "_ heads"]]) -> Float[Tensor, ""]:
    """Mean over samples and heads of several batches; empty samples are ignored."""
    if sum(values.numel() for values in each) == 0:
        return torch.zeros(())
    if all(isinstance(batch.tokens, int) for batch in batches):
        return torch.cat(each).mean() if len(each) > 1 else each[0].mean()
    here = torch.cat([torch.as_tensor(batch.tokens) > 0 for batch in batches])
    return (torch.cat(each).mean(1) * here).sum() / here.sum().clamp(min=1)


class Last:
    """The batch, or packed batches, of the last forward pass; not copied or pickled with the layer."""

    def __init__(self) -> None:
        self.batches: tuple[Batch, ...] = ()
        self.called = self.graph = False
        self._waiting = self._missed = False
        self._weights: list[Tensor] = []
        self._states: list[tuple[Any, ...]] | None = None
        self._backward = -1

    def keep(self, batches: tuple[Batch, ...], training: bool, *weights: Tensor) -> None:
        """Store the batches of a forward pass, and the versions of the weights it used."""
        self._until_the_end_of_backward()
        self.batches = batches
        self.called = True
        self.graph = torch.is_grad_enabled()
        if torch.compiler.is_compiling():  # tensors have no versions here
            self._states = None
            self._waiting = False
            self._missed = False
            return
        self._waiting = self._waiting and not self.changed()  # training steps that do not use the regularizer
        if training and self.graph:
            self._waiting, self._missed = True, self._waiting
        self._weights, self._states = list(weights), [_state(weight) for weight in weights]

    def _until_the_end_of_backward(self) -> None:
        """Restore the state of the first run after backward if activation checkpointing runs the layer again in it.

        Otherwise the second graph, which is never used, would stay in memory.
        """
        if torch.compiler.is_compiling():
            return
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._backward):
            before, self._backward = dict(self.__dict__), task
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.__dict__.update(before))

    def changed(self) -> bool:
        """Whether weights were changed or moved since."""
        if self._states is None or torch.compiler.is_compiling():
            return False
        return [_state(weight) for weight in self._weights] != self._states

    def warn_if_missed(self) -> None:
        """Warn, once, if the loss of an earlier training forward pass was never read."""
        if torch.compiler.is_compiling():
            return
        missed, self._waiting, self._missed = self._missed, False, False
        if missed:
            warnings.warn(FORGOTTEN, stacklevel=3)

    def __deepcopy__(self, memo: Any) -> Last:
        return Last()

    def __reduce__(self) -> tuple[type[Last], tuple[()]]:
        return Last, ()


def _state(weight: Tensor) -> tuple[Any, ...]:
    return weight._version, weight.dtype, weight.device


def objective(
    batch: Batch, directions: Float[Tensor, "2 heads rows s"], log_lambda: Float[Tensor, "heads s"]
) -> Float[Tensor, "batch heads"]:
    """J = ½ mean eᵀΛe + ½ mean rᵀΛr − tr(WeᵀWr) per sample and head, over the rows of We and Wr in use."""
    energy, rows = batch.energy, _rows(batch, directions)
    product = rows[0] * rows[1]
    trace = product.sum((-2, -1)) if batch.used is None else batch.used.to(product.dtype) @ product.sum(-1).mT
    return _per_token((energy * _exact(log_lambda).exp()).sum((0, -1)), batch) / 2 - trace


def reconstruction(
    batch: Batch, directions: Float[Tensor, "2 heads rows s"], log_lambda: Float[Tensor, "heads s"]
) -> Float[Tensor, "batch heads"]:
    """‖K − EΛRᵀ‖²/‖K‖² + 0.1·(relative KKT residual)², minimal only at the KSVD of K = Φ_q f(X)ᵀf(X) Φ_kᵀ.

    Nothing of size n × n is formed: with G_q, G_k, S = f(X)ᵀf(X) (p×p each) ‖K‖² = tr(G_q S G_k S).
    """
    weights, grams = _exact(batch.weights), _exact(batch.grams)
    scale = _exact(log_lambda).exp().unsqueeze(-2)  # (heads, 1, s)
    moved = grams @ weights  # G_qW_e|X, G_kW_r|X
    if batch.sample is None:
        size = (grams[0] * grams[1]).sum((-2, -1))
        cross = (moved[0] * scale * moved[1]).sum((-2, -1))
    else:
        sample = _sample(batch)
        core = sample.mT @ sample
        left, right = grams[0] @ core, grams[1] @ core
        size = (left * right.mT).sum((-2, -1))
        cross = (moved[0] * scale * (core @ moved[1])).sum((-2, -1))
    inner = weights.mT @ moved  # EᵀE, RᵀR
    own = (inner[0] * scale * inner[1] * scale.mT).sum((-2, -1))
    lost = (size - 2 * cross + own) / torch.where(size > 0, size, 1.0)
    return lost + SHARE * kkt(batch, directions, log_lambda)


def kkt(
    batch: Batch, directions: Float[Tensor, "2 heads rows s"], log_lambda: Float[Tensor, "heads s"]
) -> Float[Tensor, "batch heads"]:
    """Relative KKT residual, squared: ‖(∂J/∂We, ∂J/∂Wr)‖²/‖(Wr, We)‖², ∂J/∂We = f(X)G_qW_e|XΛ/N − Wr."""
    weights, grams = _exact(batch.weights), _exact(batch.grams)
    steps = _per_token(grams @ weights * _exact(log_lambda).exp().unsqueeze(-2), batch)
    rows = _rows(batch, directions).unsqueeze(1)  # (2, 1, heads, rows, s)
    if batch.sample is not None:
        steps = _sample(batch) @ steps
        rows = rows if batch.used is None else rows * batch.used[:, None, :, None]
    size = rows.square().sum((0, -2, -1))
    return (steps - rows.flip(0)).square().sum((0, -2, -1)) / torch.where(size > 0, size, 1.0)


def _per_token(total: Tensor, batch: Batch) -> Tensor:
    """A sum over tokens (..., batch, heads, ·, ·) or (batch, heads), divided by their number."""
    if isinstance(batch.tokens, int):
        return total / max(batch.tokens, 1)
    count = batch.tokens.clamp(min=1)
    return total / (count[:, None] if total.ndim == 2 else count[:, None, None, None])


def _rows(batch: Batch, directions: Tensor) -> Tensor:
    """The rows of We and Wr in use by any sample."""
    return _exact(directions if batch.rows is None else directions[:, :, : batch.rows])


def _sample(batch: Batch) -> Tensor:
    """f(X), (batch, heads, rows, p), with unused rows 0."""
    assert batch.sample is not None
    sample = _exact(batch.sample)
    return (sample if batch.used is None else sample * batch.used[:, :, None, None]).transpose(1, 2)


def _exact(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
