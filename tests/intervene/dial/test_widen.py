"""The fast way to wide queries and keys against the plain one, and both against the scores they stand for."""

import pytest
import torch

import keyquery as kq
from keyquery.intervene.dial import widen_triton
from keyquery.intervene.dial.widen import HalfTurn, reference, widen

GAINS = {
    "all": torch.tensor([[1.0, 0.5], [0.0, 2.0], [0.7, 1.0], [0.3, 1.2], [1.5, 0.0]], dtype=torch.float64),
    "no exchange": torch.tensor([[0.5, 1.0], [0.5, 1.0], [0.0, 2.0], [0.6, 1.0], [1.0, 1.0]], dtype=torch.float64),
}


def inputs(dtype, batch=2, heads=2, m=45, rank=24, shared=True):
    """Queries and keys as views of one projection, as models have them."""
    both = torch.randn(batch, m, 2, heads, rank, dtype=dtype)
    queries, keys = (both[:, :, side].transpose(1, 2) for side in (0, 1))
    at_query, at_key = torch.randn(2, 1 if shared else batch, heads, m, rank, dtype=dtype)
    return queries, keys, at_query, at_key


def half_turn(kind, m=45, batch=2, rank=24):
    """R(−2t) of a head, at positions that sequences share or not; all cosines differ."""
    if kind == "none":
        return None
    angles = 2 * kq.Rope(rank).angles(torch.rand(batch if kind == "apart" else 1, m) * 50)
    return HalfTurn(angles.cos().float(), angles.sin().float(), 0, False)


CASES = [
    (gains, placed, *case)
    for gains in GAINS
    for placed in (True, False)
    for case in ((True, 45, "none", 24), (False, 7, "shared", 24), (True, 7, "apart", 16))
]


@pytest.mark.parametrize(("gains", "placed", "shared", "new", "rotated", "rank"), CASES)
@pytest.mark.few(6)
def test_the_kernel_gives_what_the_reference_gives_in_float64(gains, placed, shared, new, rotated, rank):
    gains, turn = GAINS[gains], half_turn(rotated, rank=rank)
    given = inputs(torch.float32, shared=shared, rank=rank)
    options = (gains, new, not torch.equal(gains[0], gains[1]), placed, turn)
    expected = reference(*(t.double() for t in given), *options)
    for ours, theirs in zip(widen_triton.widen(*given, *options), expected, strict=True):
        assert (ours.double() - theirs).norm() < 5e-7 * theirs.norm()


def test_a_half_turn_takes_vectors_rotated_forward_to_those_rotated_back():
    for interleaved in (False, True):
        rope, positions = kq.Rope(8, interleaved=interleaved, factor=1.3), torch.rand(2, 1, 5, dtype=torch.float64) * 99
        x = torch.randn(2, 3, 5, 10, dtype=torch.float64)
        angles = 2 * rope.angles(positions.squeeze(1))
        turn = HalfTurn(angles.cos(), angles.sin(), 0, interleaved)
        torch.testing.assert_close(turn(rope.rotate(x, positions)), rope.rotate(x, -positions), atol=1e-12, rtol=1e-12)


def test_short_floats_are_rounded_once():
    """No further from float64 than twice the rounding of the result itself."""
    given = inputs(torch.bfloat16, rank=16)
    exact = reference(*(t.double() for t in given), GAINS["all"], 45, True, True)
    for rounded, truth in zip(widen_triton.widen(*given, GAINS["all"], 45, True, True), exact, strict=True):
        allowed = 2 * (truth.bfloat16().double() - truth).abs().max()
        assert (rounded.double() - truth).abs().max() <= allowed


def test_scores_are_the_parts_with_their_gains():
    queries, keys, at_query, at_key = inputs(torch.float64, m=6, rank=8)
    query, key = widen(queries, keys, at_query, at_key, GAINS["all"], 6, True, True)
    q, k = queries - at_query, keys - at_key
    pairs = q @ k.mT
    symmetric, skew, popularity, query_only, position = GAINS["all"].to(q)[:, :, None, None]
    expected = symmetric * (pairs + pairs.mT) / 2 + skew * (pairs - pairs.mT) / 2
    expected = expected + popularity * at_query @ k.mT + query_only * q @ at_key.mT + position * at_query @ at_key.mT
    assert (query @ key.mT - expected).abs().max() < 1e-12
