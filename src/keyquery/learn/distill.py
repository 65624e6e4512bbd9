"""`distill`: a primal attention layer initialised from a trained softmax layer, and how well it approximates it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints import read
from keyquery.intervene.swap.build import build, check_layer, start_nearest
from keyquery.layers import Attention
from keyquery.learn.layers import PrimalAttention
from keyquery.listening.exclusive import temporarily
from keyquery.listening.hooks import on_input
from keyquery.reading import Reading, digests, provenance
from keyquery.support.checks import check_float

RIDGES = (1e-6, 1e-4, 1e-2, 1.0, 100.0)  # relative to the mean energy of a regressor; chosen on validation data


@dataclass(frozen=True, kw_only=True)
class Distillation(Reading, kind="distillation"):
    """Explained variance (R²) of a softmax layer's output by a primal layer, on held-out sequences.

    1 is exact, 0 as good as the mean, below 0 worse. `heads` has the same per head, up to a constant that the output
    projection could add.
    """

    units: ClassVar[Mapping[str, str]] = {"kept": "share of variance"}

    rank: int  # of the primal layer
    kept: float
    heads: list[float]  # R² per head


class Distilled(NamedTuple):
    """A primal layer, and its reading."""

    layer: PrimalAttention  # the primal layer
    reading: Distillation  # how well it explains the softmax layer


@torch.no_grad()
def distill(layer: nn.Module, data: Float[Tensor, "batch n d"], rank: int, **options: Any) -> Distilled:
    """Distill a softmax attention layer into a primal one (kq.PrimalAttention).

    Queries, keys and the output projection are copied. Per head, [f(X)φ(q), f(X)φ(k)]·[We; Wr]·C is the ridge
    regression of its outputs of the given rank, with one C for all heads.

    Parameters
    ----------
    layer
        A kq.Attention, an nn.MultiheadAttention, or a model with a single self-attention.
    data
        Inputs of the layer, (batch, n, d), at least 3 sequences. The last quarter is the test split.
    rank
        Rank of the primal layer.
    **options
        Options of kq.PrimalAttention. Data-dependent weights are sums over tokens, and represent a fixed map only if
        tokens have a nonzero mean: `data_dependent=False` often keeps more, but mixes no tokens. Default: its defaults.

    Returns
    -------
    Distilled
        The primal `layer` and a `reading` with its explained variance. RoPE is not carried over.

    Raises
    ------
    TypeError, ValueError
        If the layer has no single self-attention or active dropout, or `data` has too few sequences.

    Examples
    --------
    >>> distilled = kq.distill(kq.Attention(16, heads=2), torch.randn(8, 40, 16), rank=4)
    >>> distilled.layer(torch.randn(1, 10, 16)).shape, distilled.reading.kept <= 1
    (torch.Size([1, 10, 16]), True)

    See Also
    --------
    swap : Replace attention by a structured kernel.
    """
    teacher = _teacher(layer)
    check_float("data", data, "batch n d", d=teacher.dim)
    if len(data) < 3:
        raise ValueError(f"data must have at least 3 sequences, for fitting, validation and test, got {len(data)}")
    weight = teacher.value.weight
    student = PrimalAttention(teacher.dim, teacher.heads, rank, bias=True, **options).to(weight.device, weight.dtype)
    _carry(teacher, student)
    data = data.to(weight.device, weight.dtype)
    share = max(1, len(data) // 4)
    fit, validation, test = data[: -2 * share], data[-2 * share : -share], data[-share:]
    ridge = max(RIDGES, key=lambda ridge: _kept(teacher, _fitted(teacher, student, fit, ridge), validation)[0])
    student = _fitted(teacher, student, data[:-share], ridge)
    kept, heads = _kept(teacher, student, test)
    facts = {"ridge": ridge, "sequences": len(data), "held_out": share, "rope": teacher.rope is not None}
    facts_of_run = provenance(**facts, tensors=digests(teacher.state_dict()))
    return Distilled(student, Distillation(rank=rank, kept=kept, heads=heads, provenance=facts_of_run))


def _teacher(layer: nn.Module) -> Attention:
    """The softmax layer as a kq.Attention."""
    if isinstance(layer, Attention):
        attention = layer
    else:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer must be a torch.nn.Module with self-attention, got {type(layer).__name__}")
        heads = read(layer)
        if len(heads) != 1:
            raise ValueError(f"layer must have exactly one self-attention, but {type(layer).__name__} has {len(heads)}")
        check_layer(layer, heads, heads[0])
        attention = build(layer, heads, heads[0], "general", 0.5)
        start_nearest(attention, heads[0])
        attention.train(layer.training)
    if attention.heads * attention.head_dim != attention.dim:
        widths = f"{attention.heads} of {attention.head_dim} in {attention.dim}"
        raise ValueError(f"a primal layer needs heads · head_dim = width, got {widths}")
    if attention.training and attention.dropout > 0:
        raise ValueError("the layer is in training mode with dropout: call layer.eval() first")
    return attention


def _carry(teacher: Attention, student: PrimalAttention) -> None:
    """Copy queries, keys and the output projection; shared keys (GQA) are repeated per head."""
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
    """The student with weights from a ridge regression of the teacher's head outputs on its features."""
    regressors, targets = _regressors(student, data), _heads_of(teacher, data)
    middle, aim = regressors.mean(1, keepdim=True), targets.mean(1, keepdim=True)
    centred = regressors - middle
    gram = centred.mT @ centred
    size = ridge * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp(min=1e-12)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    weights = torch.linalg.solve(gram + size * eye, centred.mT @ (targets - aim))  # (heads, 2·rows, p)
    spread = (weights.mT @ gram @ weights).sum(0)
    # Leading directions of the fitted outputs over all heads.
    common = torch.linalg.eigh(spread).eigenvectors[:, -student.rank :]
    sides = (weights @ common).unflatten(1, (2, -1)).transpose(0, 1)
    student.directions.zero_()  # unused rows contribute nothing
    student.directions[:, :, : sides.shape[2]] = sides.to(student.directions)
    student.concat.weight.copy_(torch.cat((common, common), -1))
    student.concat.bias.zero_()
    offset = aim - middle @ weights @ common @ common.mT  # of every head; added by the output bias
    bias = offset.flatten().to(student.output.weight) @ student.output.weight.mT
    student.output.bias.copy_(bias if teacher.output.bias is None else bias + teacher.output.bias)
    return student


def _regressors(student: PrimalAttention, data: Tensor) -> Float[Tensor, "heads tokens both"]:
    """[f(X)φ(q), f(X)φ(k)] of every token, in float64."""
    phi, sample = student.kernel_parts(data)
    features = phi if sample is None else phi @ sample.mT
    return torch.cat((features[0], features[1]), -1).transpose(0, 1).flatten(1, 2)


def _heads_of(layer: Any, data: Tensor) -> Float[Tensor, "heads tokens p"]:
    """Head outputs before the output projection, in float64."""
    inputs: list[Tensor] = []

    def listening(stack: ExitStack) -> None:
        on_input(layer.output, lambda module, args, kwargs: inputs.append(args[0]), stack)

    with temporarily(layer, listening):
        layer(data)
    return inputs[0].double().unflatten(-1, (layer.heads, -1)).flatten(0, 1).transpose(0, 1)


def _kept(teacher: Attention, student: PrimalAttention, data: Tensor) -> tuple[float, list[float]]:
    """Explained variance of the output, and of every head up to a constant."""
    truth, ours = teacher(data).double().flatten(0, 1), student(data).double().flatten(0, 1)
    whole = 1 - (truth - ours).square().sum() / (truth - truth.mean(0)).square().sum().clamp(min=1e-30)
    heads = _heads_of(teacher, data)
    error = heads - _heads_of(student, data)
    error = error - error.mean(1, keepdim=True)
    spread = (heads - heads.mean(1, keepdim=True)).square().sum((1, 2)).clamp(min=1e-30)
    return float(whole), (1 - error.square().sum((1, 2)) / spread).tolist()
