"""The algebra of counts: what must hold for any counts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyquery.learn.cooccurrence.counts import dealt, log_counts, merge_pairs, normed_rows, ppmi


def counts(seed, n, zeros=0.4):
    """Directed counts, of which some are 0, and a whole row may be."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(1, 50, (n, n), generator=generator).double()
    return torch.where(torch.rand(n, n, generator=generator) < zeros, 0.0, found)


@given(st.integers(0, 1000), st.integers(2, 8))
def test_softmax_of_log_counts_is_normed_counts(seed, n):
    x = counts(seed, n)
    x[0] = 0  # a word that was never followed by any
    assert log_counts(x, 0).softmax(-1).nan_to_num().allclose(normed_rows(x), rtol=1e-14, atol=0)
    assert log_counts(x, 0.5).softmax(-1).allclose(normed_rows(x + 0.5), rtol=1e-13, atol=0)


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


def test_ppmi_by_hand():
    x = counts(5, 6)
    rows, columns = x.sum(1, keepdim=True), x.sum(0)
    found = ppmi(x, rows, columns, float(x.sum()))
    for i in range(6):
        for j in range(6):
            share = float(x[i, j]) * float(x.sum()) / (float(rows[i]) * float(columns[j]) or 1)
            assert float(found[i, j]) == pytest.approx(max(0.0, np.log(share)) if share else 0.0, abs=1e-12)


@given(st.lists(st.integers(0, 20), max_size=30), st.lists(st.integers(0, 20), max_size=30))
def test_merged_pairs_are_those_of_both(one, other):
    runs = [np.unique(np.array(keys, dtype=np.int64), return_counts=True) for keys in (one, other)]
    keys, found = merge_pairs(*runs)
    assert dict(zip(keys.tolist(), found.tolist(), strict=True)) == {
        key: (one + other).count(key) for key in one + other
    }
    assert (np.diff(keys) > 0).all()


@pytest.mark.parametrize(
    ("shape", "heads", "rank", "said"),
    [
        ((2, 3), 1, None, "matrix must be square"),
        ((3, 3), 4, None, "heads must be between 1 and 3"),
        ((4, 4), 2, 3, "rank must be between 1 and 2, got 3"),
    ],
)
@pytest.mark.unchecked
def test_what_cannot_be_dealt_is_told(shape, heads, rank, said):
    with pytest.raises(ValueError, match=said):
        dealt(torch.ones(shape), heads, rank)
