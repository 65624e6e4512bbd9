"""Attention that comes out of counting: what co-occurrence counts become, and their projection onto a sequence.

X (n, n) holds how often word j stands after word i, S any symmetric matrix of the kind, Q (R, n) selects the words of a
sequence. After "Self-Attention as Distributional Projection" (2025), with the directed form beside the symmetric one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from keyquery.forms.form import Form
from keyquery.support.checks import check_count, check_float

KINDS = ("counts", "log", "ppmi")


class Projected(NamedTuple):
    """What a sequence of R words makes of n words: M (R, R), its rows' shares, E (R, n), their mean e, softmax p."""

    M: Float[Tensor, "R R"]
    norm: Float[Tensor, "R R"]
    E: Float[Tensor, "R n"]
    e: Float[Tensor, " n"]
    p: Float[Tensor, " n"]


def project(
    gathered: Float[Tensor, "R n"],
    tokens: Int[Tensor, " R"],
    positions: Float[Tensor, "R n"] | None = None,
    normed: bool = False,
) -> Projected:
    """M = QSQᵀ, Norm(M), E = M(QS), e = mean of E's rows, p = softmax(e), out of the rows QS that were gathered.

    With `positions` P, Q + P stands for Q, and `gathered` is (Q + P)S. With `normed`, E = Norm(M)(QS): raw counts make
    p all but one-hot.

    >>> s = torch.tensor([[0.0, 2.0, 1.0], [2.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    >>> project(s[[0, 1]], torch.tensor([0, 1])).e
    tensor([2., 2., 1.], dtype=torch.float64)
    """
    m = gathered[:, tokens]  # (QS)Qᵀ is a gather
    if positions is not None:
        m = m + gathered @ positions.mT
    norm = normed_rows(m)
    found = (norm if normed else m) @ gathered
    e = found.mean(0)
    return Projected(m, norm, found, e, e.softmax(0))


def normed_rows(m: Float[Tensor, "... R R"]) -> Float[Tensor, "... R R"]:
    """M_rs / Σ_t M_rt; a row without any counts stays 0.

    >>> normed_rows(torch.tensor([[0.0, 4.0], [0.0, 0.0]]))
    tensor([[0., 1.],
            [0., 0.]])
    """
    sums = m.sum(-1, keepdim=True)
    return m / torch.where(sums == 0, 1.0, sums)


def attention_of(scores: Float[Tensor, "... R R"]) -> Float[Tensor, "... R R"]:
    """Row-softmax, where a row of −∞ attends to nothing. That of log X is `normed_rows` of X, exactly.

    >>> x = torch.tensor([[3.0, 1.0], [0.0, 0.0]])
    >>> attention_of(x.log())
    tensor([[0.7500, 0.2500],
            [0.0000, 0.0000]])
    """
    blind = scores.isneginf().all(-1, keepdim=True)
    return torch.where(blind, 0.0, torch.where(blind, 0.0, scores).softmax(-1))


def log_counts(counts: Float[Tensor, ...], smooth: float = 1.0) -> Float[Tensor, ...]:
    """log(X + smooth). With 1, pairs that were never seen stay 0; with 0 they are −∞.

    >>> log_counts(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.6931])
    """
    return (counts + smooth).log() if smooth != 1 else counts.log1p()


def ppmi(
    counts: Float[Tensor, ...], rows: Float[Tensor, ...], columns: Float[Tensor, ...], total: float
) -> Float[Tensor, ...]:
    """max(0, log(X_ij·ΣX / X_i·X_j)), with the sums of rows and columns as they belong to each count.

    >>> x = torch.tensor([[0.0, 4.0], [4.0, 0.0]])
    >>> ppmi(x, x.sum(1, keepdim=True), x.sum(0), x.sum().item())
    tensor([[0.0000, 0.6931],
            [0.6931, 0.0000]])
    """
    expected = rows * columns / (total or 1.0)
    return (counts / torch.where(expected > 0, expected, 1.0)).log().clamp(min=0.0)


def truncated(matrix: Float[Tensor, "n n"], rank: int | None = None) -> Form:
    """The rank-r form nearest to a matrix, UΣVᵀ of its largest singular values, as factors √ΣUᵀ and √ΣVᵀ.

    No form of that rank is nearer (Eckart–Young): ‖matrix − form‖ = √Σ σᵢ² over the values that are left out.

    >>> form = truncated(torch.tensor([[0.0, 3.0], [1.0, 0.0]]), rank=1)
    >>> (form.dense().abs() > 1e-6).tolist()
    [[False, True], [False, False]]
    """
    return dealt(matrix, 1, rank)[0]


def dealt(matrix: Float[Tensor, "n n"], heads: int, rank: int | None = None) -> Form:
    """A matrix as heads, pieces of rank r that add up to its nearest form of rank heads·r: a Form with batch (heads,).

    Singular values are dealt out in turn, so that no head has all of the large ones.

    >>> pieces = dealt(torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0])), heads=2, rank=1)
    >>> pieces.singular_values().flatten().round(decimals=6).tolist()
    [4.0, 3.0]
    """
    check_float("matrix", matrix, "n n")
    size = len(matrix)
    if matrix.shape != (size, size):
        raise ValueError(f"matrix must be square, got {tuple(matrix.shape)}")
    check_count("heads", heads, least=1, most=size)
    check_count("rank", rank, least=1, most=size // heads, optional=True)
    count = heads * (size // heads if rank is None else rank)
    u, values, v = torch.linalg.svd(matrix.double())
    root = values[:count].sqrt()
    query, key = ((part * root).mT.unflatten(0, (-1, heads)).transpose(0, 1) for part in (u[:, :count], v[:count].mT))
    return Form(query.to(matrix.dtype).contiguous(), key.to(matrix.dtype).contiguous())


def symmetry_of(matrix: Float[Tensor, "n n"]) -> float:
    """tr(X²)/‖X‖², as of a form: 1 symmetric, −1 skew; 0 where there is nothing.

    >>> symmetry_of(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    0.0
    """
    energy = matrix.double().square().sum()
    return float((matrix.double() * matrix.double().mT).sum() / torch.where(energy > 0, energy, 1.0))


def count_pairs(
    ids: Int[ndarray, " tokens"], texts: Int[ndarray, " tokens"], window: int, old: int = 0
) -> tuple[Int[ndarray, " pairs"], Int[ndarray, " pairs"]]:
    """How often word b stands at most `window` places after word a in one text, as keys a·2³² + b and their counts.

    `texts` numbers the text of each token, and tokens below 0 are holes. Only pairs whose second token is not among the
    first `old` are counted: these were counted before.

    >>> keys, counts = count_pairs(np.array([0, 1, 0]), np.zeros(3, dtype=np.int64), window=1)
    >>> [(int(key) >> 32, int(key) & 0xFFFFFFFF, int(count)) for key, count in zip(keys, counts)]
    [(0, 1, 1), (1, 0, 1)]
    """
    found = []
    holes = bool((ids < 0).any())
    for offset in range(1, min(window, len(ids) - 1) + 1):
        start = max(old - offset, 0)
        first, second = ids[start : len(ids) - offset], ids[start + offset :]
        kept = texts[start : len(ids) - offset] == texts[start + offset :]
        if holes:
            kept &= (first >= 0) & (second >= 0)
        keys = (first << 32) | second
        found.append(keys if kept.all() else keys[kept])
    if not found:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    keys, counts = np.unique(np.concatenate(found), return_counts=True)
    return keys, counts.astype(np.int64)


def merge_pairs(
    one: tuple[Int[ndarray, " a"], Int[ndarray, " a"]], other: tuple[Int[ndarray, " b"], Int[ndarray, " b"]]
) -> tuple[Int[ndarray, " c"], Int[ndarray, " c"]]:
    """Two sorted lists of keys and counts as one, the counts of equal keys added.

    >>> keys, counts = merge_pairs((np.array([1, 3]), np.array([1, 1])), (np.array([3]), np.array([5])))
    >>> keys.tolist(), counts.tolist()
    ([1, 3], [1, 6])
    """
    if not len(one[0]) or not len(other[0]):
        return one if len(one[0]) else other
    keys = np.concatenate((one[0], other[0]))
    order = keys.argsort(kind="stable")  # two sorted runs: linear
    keys, counts = keys[order], np.concatenate((one[1], other[1]))[order]
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    return keys[starts], np.add.reduceat(counts, starts)
