"""The algebra of counts: what must hold for any counts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyquery.learn.cooccurrence.cooccurrence import dealt


def counts(seed, n, zeros=0.4):
    """Directed counts, of which some are 0, and a whole row may be."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(1, 50, (n, n), generator=generator).double()
    return torch.where(torch.rand(n, n, generator=generator) < zeros, 0.0, found)


@given(st.integers(0, 1000), st.integers(2, 8), st.data())
def test_no_form_of_the_rank_is_nearer(seed, n, data):
    x = counts(seed, n)
    rank = data.draw(st.integers(1, n))
    left = float((x - dealt(x, 1, rank)[0].dense()).norm())
    values = np.linalg.svd(x.numpy(), compute_uv=False)
    assert left == pytest.approx(np.sqrt((values[rank:] ** 2).sum()), abs=1e-9)


def test_pieces_add_up_to_the_nearest_form_and_share_its_values():
    x = counts(3, 9)
    pieces = dealt(x, heads=3, rank=2)
    assert pieces.batch == (3,)
    assert pieces.dense().sum(0).allclose(dealt(x, 1, 6)[0].dense(), atol=1e-9)
    values = torch.linalg.svdvals(x)
    for head in range(3):
        assert pieces[head].singular_values().allclose(values[[head, head + 3]])


@pytest.mark.parametrize(
    ("shape", "heads", "rank", "said"),
    [
        ((2, 3), 1, None, "matrix must have shape .* with n = 2"),
        ((3, 3), 4, None, "heads must be between 1 and 3"),
        ((4, 4), 2, 3, "rank must be between 1 and 2, got 3"),
    ],
)
@pytest.mark.unchecked
def test_what_cannot_be_dealt_is_told(shape, heads, rank, said):
    with pytest.raises(ValueError, match=said):
        dealt(torch.ones(shape), heads, rank)
