"""Transformations of co-occurrence counts X (n, n), and the counting of pairs of ids.

After "Self-Attention as Distributional Projection" (2025), with directed counts in addition to symmetric ones.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from keyquery.forms.form import Form
from keyquery.support.checks import check_count, check_float

KINDS = ("counts", "log", "ppmi")


def normed_rows(m: Float[Tensor, "... R R"]) -> Float[Tensor, "... R R"]:
    """M_rs / Σ_t M_rt; a row without any counts stays 0."""
    sums = m.sum(-1, keepdim=True)
    return m / torch.where(sums == 0, 1.0, sums)


def log_counts(counts: Float[Tensor, "..."], smooth: float = 1.0) -> Float[Tensor, "..."]:
    """log(X + smooth). With 1, pairs that were never seen stay 0; with 0 they are −∞."""
    return (counts + smooth).log() if smooth != 1 else counts.log1p()


def ppmi(
    counts: Float[Tensor, "..."], rows: Float[Tensor, "..."], columns: Float[Tensor, "..."], total: float
) -> Float[Tensor, "..."]:
    """max(0, log(X_ij·ΣX / X_i·X_j)), given for each count the sum of its row and of its column."""
    expected = rows * columns / (total or 1.0)
    return (counts / torch.where(expected > 0, expected, 1.0)).log().clamp(min=0.0)


def dealt(matrix: Float[Tensor, "n n"], heads: int, rank: int | None = None) -> Form:
    """A matrix split into heads of rank r that sum to its nearest form of rank heads·r: a Form with batch (heads,).

    No form of that rank is nearer (Eckart–Young). Singular values are assigned to heads in turn, so that no head has
    all of the large ones.
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


def count_pairs(
    ids: Int[ndarray, " tokens"], texts: Int[ndarray, " tokens"], window: int, old: int = 0
) -> tuple[Int[ndarray, " pairs"], Int[ndarray, " pairs"]]:
    """How often word b occurs at most `window` positions after word a in one text, as keys a·2³² + b and their counts.

    `texts` is the index of the text of each token, and tokens below 0 are skipped. Pairs whose second token is among
    the first `old` are not counted again.
    """
    runs = [np.zeros(0, dtype=np.int64)]
    for offset in range(1, min(window, len(ids) - 1) + 1):
        start = max(old - offset, 0)
        first, second = ids[start : len(ids) - offset], ids[start + offset :]
        kept = (texts[start : len(ids) - offset] == texts[start + offset :]) & (first >= 0) & (second >= 0)
        runs.append(((first << 32) | second)[kept])
    keys, counts = np.unique(np.concatenate(runs), return_counts=True)
    return keys, counts.astype(np.int64)


def merge_pairs(
    first: tuple[Int[ndarray, " a"], Int[ndarray, " a"]], second: tuple[Int[ndarray, " b"], Int[ndarray, " b"]]
) -> tuple[Int[ndarray, " c"], Int[ndarray, " c"]]:
    """Two sorted lists of keys and counts as one, the counts of equal keys added."""
    if not len(first[0]) or not len(second[0]):
        return first if len(first[0]) else second
    keys = np.concatenate((first[0], second[0]))
    order = keys.argsort(kind="stable")  # two sorted runs: linear
    keys, counts = keys[order], np.concatenate((first[1], second[1]))[order]
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    return keys[starts], np.add.reduceat(counts, starts)
