"""`distill`: a primal layer that starts from a trained softmax layer, and how much of it was kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints import read
from keyquery.layers import Attention, PrimalAttention
from keyquery.reading import Reading, digests, provenance
from keyquery.support.checks import check_float
from keyquery.surgery.swap.build import build, check_layer, start_nearest

RIDGES = (1e-6, 1e-4, 1e-2, 1.0, 100.0)  # shares of the mean energy of a regressor; data chooses


@dataclass(frozen=True, kw_only=True)
class Distillation(Reading, kind="distillation"):
    """The share of the variance of a softmax layer's output that a primal layer keeps, on sequences not fitted to.

    1 is all, 0 no more than its mean, below 0 worse than that. `heads` has the same for the output of every head, each
    compared up to a constant, which the output map could add.
    """

    units: ClassVar[Mapping[str, str]] = {"kept": "share of variance"}

    rank: int
    kept: float
    heads: list[float]


class Distilled(NamedTuple):
    """A primal layer and what it kept."""

    layer: PrimalAttention
    reading: Distillation


@torch.no_grad()
def distill(layer: nn.Module, data: Float[Tensor, "batch n d"], rank: int, **options: Any) -> Distilled:
    """A primal layer with the queries, keys and output map of a softmax layer, weights fitted to its heads' outputs.

    `layer` is a kq.Attention, an nn.MultiheadAttention or a model with one self-attention; `data` (batch, n, d) is what
    it takes, at least 3 sequences. For every head [f(X)φ(q), f(X)φ(k)]·[We; Wr]·C is the ridge regression of its
    outputs of the given rank, with one C for all heads. The last quarter of the sequences is kept for the reading.
    `options` are those of kq.PrimalAttention. Rotary positions are not carried over. Data-dependent weights are sums of
    tokens: they hold a fixed map only where tokens have a mean. `data_dependent=False` often keeps more, mixing none.

    >>> found = kq.distill(kq.Attention(16, heads=2), torch.randn(8, 40, 16), rank=4)
    >>> found.layer(torch.randn(1, 10, 16)).shape, found.reading.kept <= 1
    (torch.Size([1, 10, 16]), True)
    """
    teacher = _teacher(layer)
    check_float("data", data, "batch n d", d=teacher.dim)
    if len(data) < 3:
        raise ValueError(f"data must hold at least 3 sequences, to fit, to choose and to report, got {len(data)}")
    weight = teacher.value.weight
    if not {"bias", "init", "data", "device", "dtype"}.isdisjoint(options):
        raise ValueError("bias, init, data, device and dtype are those of the layer that is distilled: leave them out")
    student = PrimalAttention(teacher.dim, teacher.heads, rank, **options).to(weight.device, weight.dtype)
    _carry(teacher, student)
    data = data.to(weight.device, weight.dtype)
    share = max(1, len(data) // 4)
    fit, chosen, held = data[: -2 * share], data[-2 * share : -share], data[-share:]
    ridge = max(RIDGES, key=lambda ridge: _kept(teacher, _fitted(teacher, student, fit, ridge), chosen)[0])
    student = _fitted(teacher, student, data[:-share], ridge)
    kept, heads = _kept(teacher, student, held)
    facts = {"ridge": ridge, "sequences": len(data), "held_out": share, "rope": teacher.rope is not None}
    said = provenance(**facts, tensors=digests(teacher.state_dict()))
    return Distilled(student, Distillation(rank=rank, kept=kept, heads=heads, provenance=said))


def _teacher(layer: nn.Module) -> Attention:
    """The softmax layer as a kq.Attention."""
    if isinstance(layer, Attention):
        attention = layer
    else:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer must be a torch.nn.Module with self-attention, got {type(layer).__name__}")
        heads = read(layer)
        if len(heads) != 1:
            raise ValueError(f"layer must have one self-attention, but {type(layer).__name__} has {len(heads)}")
        check_layer(layer, heads, heads[0])
        attention = build(layer, heads, heads[0], "general", 0.5)
        start_nearest(attention, heads[0])
        attention.train(layer.training)
    if attention.heads * attention.head_dim != attention.dim:
        widths = f"{attention.heads} of {attention.head_dim} in {attention.dim}"
        raise ValueError(f"the heads of a primal layer together are as wide as the model, not {widths}")
    if attention.training and attention.dropout > 0:
        raise ValueError("the layer is in training with dropout: call layer.eval() first")
    return attention


def _carry(teacher: Attention, student: PrimalAttention) -> None:
    """Queries, keys and the output map of the softmax layer; where heads share a key, each gets its own."""
    form, biases = teacher.form(), teacher.biases()
    shape = (teacher.heads, teacher.head_dim, teacher.dim)
    weights = [part.expand(*form.batch, -1, -1).reshape(shape) for part in (form.query, form.key)]
    student.query_key.weight.copy_(torch.cat(weights).flatten(0, 1))
    student.query_key.bias.zero_()
    if biases[0] is not None and biases[1] is not None:
        both = biases[0], biases[1].repeat_interleave(teacher.heads // teacher.kv_heads, 0)
        student.query_key.bias.copy_(torch.cat(both).flatten())
    student.output.weight.copy_(teacher.output.weight)


def _fitted(teacher: Attention, student: PrimalAttention, data: Tensor, ridge: float) -> PrimalAttention:
    """The student with weights that regress the teacher's heads on its own scores before We and Wr."""
    regressors, targets = _regressors(student, data), _heads_of(teacher, data)
    middle, aim = regressors.mean(1, keepdim=True), targets.mean(1, keepdim=True)
    centred = regressors - middle
    gram = centred.mT @ centred
    size = ridge * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp(min=1e-12)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    found = torch.linalg.solve(gram + size * eye, centred.mT @ (targets - aim))  # (heads, 2·rows, p)
    spread = (found.mT @ gram @ found).sum(0)
    common = torch.linalg.eigh(spread).eigenvectors[:, -student.rank :]  # where fitted outputs vary most, in all heads
    sides = (found @ common).unflatten(1, (2, -1)).transpose(0, 1)
    student.directions.zero_()  # rows that the data does not fill add nothing
    student.directions[:, :, : sides.shape[2]] = sides.to(student.directions)
    student.concat.weight.copy_(torch.cat((common, common), -1))
    student.concat.bias.zero_()
    offset = aim - middle @ found @ common @ common.mT  # of every head; the output map can add them all
    bias = offset.flatten().to(student.output.weight) @ student.output.weight.mT
    student.output.bias.copy_(bias if teacher.output.bias is None else bias + teacher.output.bias)
    return student


def _regressors(student: PrimalAttention, data: Tensor) -> Float[Tensor, "heads tokens both"]:
    """[f(X)φ(q), f(X)φ(k)] of every token, in float64."""
    phi, sample = student.kernel_parts(data)
    found = phi if sample is None else phi @ sample.mT
    return torch.cat((found[0], found[1]), -1).transpose(0, 1).flatten(1, 2)


def _heads_of(layer: Any, data: Tensor) -> Float[Tensor, "heads tokens p"]:
    """What the heads of a layer give to its output map, in float64."""
    heard: list[Tensor] = []
    hook = layer.output.register_forward_pre_hook(lambda module, given: heard.append(given[0]))
    try:
        layer(data)
    finally:
        hook.remove()
    return heard[0].double().unflatten(-1, (layer.heads, -1)).flatten(0, 1).transpose(0, 1)


def _kept(teacher: Attention, student: PrimalAttention, data: Tensor) -> tuple[float, list[float]]:
    """The share of variance kept, of the output and of every head; heads are compared up to a constant each."""
    truth, ours = teacher(data).double().flatten(0, 1), student(data).double().flatten(0, 1)
    whole = 1 - (truth - ours).square().sum() / (truth - truth.mean(0)).square().sum().clamp(min=1e-30)
    heads, own = _heads_of(teacher, data), _heads_of(student, data)
    error = heads - own
    error = error - error.mean(1, keepdim=True)
    spread = (heads - heads.mean(1, keepdim=True)).square().sum((1, 2)).clamp(min=1e-30)
    return float(whole), (1 - error.square().sum((1, 2)) / spread).tolist()
