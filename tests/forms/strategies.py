"""Factors of forms for property tests: random ones, and every degenerate kind."""

import torch
from hypothesis import strategies as st

import keyquery as kq

BATCHES = [(), (3,), (2, 2)]


def _near(distance):
    return lambda q, k: (q, q + distance * k)


def _parallel(distance):
    return lambda q, k: (q, -0.5 * q + distance * k)


def _first_row_zero(q, k):
    q = q.clone()
    q[..., 0, :] = 0
    return q, k


def _fading_rows(q, k):
    fade = 10.0 ** -torch.arange(q.shape[-2], dtype=q.dtype)[:, None]
    return q * fade, k * fade


DEGENERATE = {
    "random": lambda q, k: (q, k),
    "tied": lambda q, k: (q, q.clone()),
    "near-tied 1e-5": _near(1e-5),
    "near-tied 1e-9": _near(1e-9),
    "near-tied 1e-13": _near(1e-13),
    "near-parallel 1e-5": _parallel(1e-5),
    "zero query": lambda q, k: (torch.zeros_like(q), k),
    "zero": lambda q, k: (torch.zeros_like(q), torch.zeros_like(k)),
    "a zero row": _first_row_zero,
    "repeated rows": lambda q, k: (q[..., :1, :].expand_as(q), k),
    "the same rows in another order": lambda q, k: (q, q.flip(-2)),
    "rank one": lambda q, k: (q[..., :1, :].expand_as(q), k[..., :1, :].expand_as(k)),
    "unequal sizes": lambda q, k: (q * 1e-8, k * 1e6),
    "fading rows": _fading_rows,
    "skew": lambda q, k: (torch.cat((q, -k), -2), torch.cat((k, q), -2)),
    "cancelling": lambda q, k: (torch.cat((q, q), -2), torch.cat((k, -k), -2)),
}


@st.composite
def pairs(draw, kinds=tuple(DEGENERATE), dtype=torch.float64, most_rank=6, most_dim=14):
    """Query and key, (..., r, d); 2r > d and r > d are as likely as the usual r ≪ d."""
    rank, dim = draw(st.integers(1, most_rank)), draw(st.integers(1, most_dim))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (*draw(st.sampled_from(BATCHES)), rank, dim)
    query, key = (torch.randn(shape, dtype=dtype, generator=generator) for _ in range(2))
    return DEGENERATE[draw(st.sampled_from(kinds))](query, key)


@st.composite
def forms(draw, **options):
    return kq.Form(*draw(pairs(**options)))


def tolerance(dtype):
    """Relative to the size of what is measured."""
    return {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]


def assert_near(given, expected, scale, dtype=torch.float64):
    """Within the tolerance of a dtype, relative to `scale`; expected is float64."""
    assert given.shape == expected.shape
    error = (given.double() - expected).abs().max() if given.numel() else torch.tensor(0.0)
    assert error <= tolerance(dtype) * float(scale) + 1e-30, f"off by {error:.3g} where the scale is {float(scale):.3g}"


@st.composite
def samples(draw, dim):
    """Centred tokens (n, d), so that their covariance xᵀx/n can have any rank."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(draw(st.integers(2, 2 * dim + 2)), dim, dtype=torch.float64, generator=generator)
    return x - x.mean(0)
