"""Spectra of M, S and A from factors against dense torch, in CPU seconds on one thread.

144 heads of GPT-2 small's shape (d 768, r 64), and one layer of an 8B model's (32 query heads, 8 key heads, d 4096,
r 128). The dense side is what one would write: svdvals(M), eigvalsh(S), eigvalsh(iA) in float32. Outputs are compared
before anything is timed.
"""

from __future__ import annotations

import statistics

import torch
from harness import cpu_seconds, publish, row

import keyquery as kq

SEED = 0


def spectra(query, key):
    form = kq.Form(query, key)
    return form.singular_values(), form.symmetric_eigenvalues(), form.skew_values()


def dense_spectra(query, key):
    M = query.mT @ key
    symmetric, skew = (M + M.mT) / 2, (M - M.mT) / 2
    return torch.linalg.svdvals(M), torch.linalg.eigvalsh(symmetric), torch.linalg.eigvalsh(1j * skew)


def check(query, key):
    """Before anything is timed: whole spectra of both sides agree to float32's precision."""
    ours, dense = spectra(query, key), dense_spectra(query, key)
    for mine, theirs in zip(ours, dense, strict=True):
        sizes = (values.abs().double().sort(descending=True).values for values in (mine, theirs))
        mine, theirs = (values[..., : mine.shape[-1]] for values in sizes)
        error = (mine - theirs).abs().max() / theirs.max()
        assert error < 1e-5, f"spectra differ by {error:.2g}"


def check_grouped(query, key):
    """The same for one grouped head, through thin QR in float64, and its energies through the dense M."""
    singular, eigenvalues, skew_values = (values[-1, -1] for values in spectra(query, key))
    upper = [torch.linalg.qr(factor.double().mT).R for factor in (query[-1, -1], key[-1, 0])]
    torch.testing.assert_close(singular, torch.linalg.svdvals(upper[0] @ upper[1].mT))
    M = query[-1, -1].mT @ key[-1, 0]
    for values, part in ((eigenvalues, M + M.mT), (skew_values, M - M.mT)):
        torch.testing.assert_close(values.norm(), part.double().norm() / 2, rtol=1e-5, atol=0)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    query, key = torch.randn(2, 144, 64, 768) / 768**0.5
    check(query[:2], key[:2])
    ours = cpu_seconds(lambda: spectra(query, key), repeats=7)
    # Twelve heads at a time: each is a measurement of its own, and none has to be repeated.
    parts = zip(query.split(12), key.split(12), strict=True)
    dense = [12 * seconds for part in parts for seconds in cpu_seconds(lambda p=part: dense_spectra(*p), repeats=1)]
    ratios = [seconds / statistics.median(ours) for seconds in dense]

    grouped_query, grouped_key = torch.randn(8, 4, 128, 4096) / 64, torch.randn(8, 1, 128, 4096) / 64
    check_grouped(grouped_query, grouped_key)
    grouped = cpu_seconds(lambda: spectra(grouped_query, grouped_key), repeats=7)

    publish(
        "forms",
        [
            row("spectra of M, S and A, 144 heads of random weights (d 768, r 64)", ours, "CPU s", "—"),
            row("the same, dense float32 torch", dense, "CPU s", "—"),
            row("spectra of 144 heads: how many times less CPU time than dense float32 torch", ratios, "×", "≥ 30 ×"),
            row(
                "random weights of one layer of an 8B model's shape (32/8 heads, d 4096, r 128)",
                grouped,
                "CPU s",
                "≤ 1 CPU s",
            ),
        ],
        seed=SEED,
    )


if __name__ == "__main__":
    main()
