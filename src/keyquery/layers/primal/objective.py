"""What a batch leaves behind for the loss: J and the reconstruction of K, from p×p Gram matrices."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LOSSES = ("paper", "ksvd")
SHARE = 0.1  # of the KKT residual beside the reconstruction, which cannot tell single triples apart
FORGOTTEN = (
    "a primal layer was called again before it was asked for its loss, and regularizer() is of the last call: ask "
    "after each call and add up, as a forward hook can (nn.DataParallel loses all replicas but one: take "
    "DistributedDataParallel)"
)


class Batch(NamedTuple):
    """Σe² and Σr² over tokens, projection weights (2, batch, heads, p, s), and how many tokens a sample has.

    `tokens` is one number where there is no padding. `rows` is how many tokens f(X) takes, None where it is the
    identity; `used` tells which of them a sample has. Gram matrices and f(X) itself are there where the loss, or a
    reading, needs them. A causal batch has no weights: every token has its own.
    """

    tokens: Float[Tensor, " batch"] | int
    used: Bool[Tensor, "batch rows"] | None
    energy: Float[Tensor, "2 batch heads s"]
    weights: Float[Tensor, "2 batch heads p s"] | None = None
    grams: Float[Tensor, "2 batch heads p p"] | None = None
    sample: Float[Tensor, "batch rows heads p"] | None = None
    rows: int | None = None
    numbers: Int[Tensor, " batch"] | None = None  # of packed samples, in the order they were given in


def mean_over_samples(batches: tuple[Batch, ...], each: list[Float[Tensor, "_ heads"]]) -> Float[Tensor, ""]:
    """The mean of what every sample and head of some batches has; samples without a token do not count."""
    if sum(found.numel() for found in each) == 0:
        return torch.zeros(())
    if all(isinstance(batch.tokens, int) for batch in batches):
        return torch.cat(each).mean() if len(each) > 1 else each[0].mean()
    here = torch.cat([torch.as_tensor(batch.tokens) > 0 for batch in batches])
    return (torch.cat(each).mean(1) * here).sum() / here.sum().clamp(min=1)


class Last:
    """The batch, or packed batches, of the last forward; copies and files of a layer do not carry it along."""

    def __init__(self) -> None:
        self.batches: tuple[Batch, ...] = ()
        self.called = self.graph = False
        self._waiting = self._missed = False
        self._weights: list[Tensor] = []
        self._states: list[tuple[Any, ...]] | None = None
        self._backward = -1

    def keep(self, batches: tuple[Batch, ...], training: bool, *weights: Tensor) -> None:
        """What a forward left behind, and the state of the weights that it was made with."""
        self._until_the_end_of_backward()
        self.batches, self.called, self.graph = batches, True, torch.is_grad_enabled()
        if torch.compiler.is_compiling():  # where tensors have no versions
            self._states, self._waiting, self._missed = None, False, False
            return
        self._waiting = self._waiting and not self.changed()  # steps of training that do not ask are no loss
        if training and self.graph:
            self._waiting, self._missed = True, self._waiting
        self._weights, self._states = list(weights), [_state(weight) for weight in weights]

    def _until_the_end_of_backward(self) -> None:
        """A checkpoint runs the layer a second time, within backward: after it, all is as the first run left it.

        Else the second graph, which nobody goes through, would be kept with all of its tokens.
        """
        if torch.compiler.is_compiling():
            return
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._backward):
            before, self._backward = dict(self.__dict__), task
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.__dict__.update(before))

    def changed(self) -> bool:
        """Whether weights were changed, or moved, since."""
        if self._states is None or torch.compiler.is_compiling():
            return False
        return [_state(weight) for weight in self._weights] != self._states

    def missed(self) -> bool:
        """Whether a forward of training before the last one was never asked for its loss; says so once."""
        if torch.compiler.is_compiling():
            return False
        missed, self._waiting, self._missed = self._missed, False, False
        return missed

    def __deepcopy__(self, memo: Any) -> Last:
        return Last()

    def __reduce__(self) -> tuple[type[Last], tuple[()]]:
        return Last, ()


def _state(weight: Tensor) -> tuple[Any, ...]:
    return weight._version, weight.dtype, weight.device


def objective(
    batch: Batch, directions: Float[Tensor, "2 heads rows s"], log_lambda: Float[Tensor, "heads s"]
) -> Float[Tensor, "batch heads"]:
    """J = ½ mean eᵀΛe + ½ mean rᵀΛr − tr(WeᵀWr) of every sample and head, over the rows that the sample has used."""
    energy, rows = batch.energy, _rows(batch, directions)
    product = rows[0] * rows[1]
    trace = product.sum((-2, -1)) if batch.used is None else batch.used.to(product.dtype) @ product.sum(-1).mT
    return _per_token((energy * _exact(log_lambda).exp()).sum((0, -1)), batch) / 2 - trace


def reconstruction(
    batch: Batch, directions: Float[Tensor, "2 heads rows s"], log_lambda: Float[Tensor, "heads s"]
) -> Float[Tensor, "batch heads"]:
    """‖K − EΛRᵀ‖²/‖K‖² + 0.1·(relative KKT residual)²: smallest at the KSVD of K = Φ_q f(X)ᵀf(X) Φ_kᵀ, and only there.

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
    """A sum over tokens (..., batch, heads, ·, ·) or (batch, heads) as their mean."""
    if isinstance(batch.tokens, int):
        return total / max(batch.tokens, 1)
    count = batch.tokens.clamp(min=1)
    return total / (count[:, None] if total.ndim == 2 else count[:, None, None, None])


def _rows(batch: Batch, directions: Tensor) -> Tensor:
    """The rows of We and Wr that any sample has filled."""
    return _exact(directions if batch.rows is None else directions[:, :, : batch.rows])


def _sample(batch: Batch) -> Tensor:
    """f(X), (batch, heads, rows, p), rows that are not used 0."""
    assert batch.sample is not None
    sample = _exact(batch.sample)
    return (sample if batch.used is None else sample * batch.used[:, :, None, None]).transpose(1, 2)


def _exact(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
