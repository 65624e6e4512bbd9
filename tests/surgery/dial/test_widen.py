"""The fast way to wide queries and keys against the plain one, and both against the scores they stand for."""

import pytest
import torch

from keyquery.surgery.dial.widen import widen

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


@pytest.mark.parametrize("gains", GAINS.values(), ids=GAINS)
@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("new", [45, 7])
@pytest.mark.parametrize("rotated", [True, False])
def test_the_kernel_gives_what_the_reference_gives(gains, placed, shared, new, rotated):
    given = inputs(torch.float32, shared=shared)
    turned = tuple(torch.randn(2, *given[0].shape)) if rotated else None
    expected, found = (
        widen(*given, gains, new, not torch.equal(gains[0], gains[1]), placed, turned, impl)
        for impl in ("reference", "triton")
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_short_floats_are_rounded_once():
    """No further from float64 than twice the rounding of the result itself."""
    given = inputs(torch.bfloat16, rank=16)
    exact = widen(*(t.double() for t in given), GAINS["all"], 45, True, True, None, "reference")
    for one, truth in zip(widen(*given, GAINS["all"], 45, True, True, None, "triton"), exact, strict=True):
        allowed = 2 * (truth.bfloat16().double() - truth).abs().max()
        assert (one.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_scores_are_the_parts_with_their_gains(impl):
    queries, keys, at_query, at_key = inputs(torch.float64 if impl == "reference" else torch.float32, m=6, rank=8)
    query, key = widen(queries, keys, at_query, at_key, GAINS["all"], 6, True, True, None, impl)
    q, k = queries - at_query, keys - at_key
    pairs = q @ k.mT
    symmetric, skew, popularity, query_only, position = GAINS["all"].to(q)[:, :, None, None]
    expected = symmetric * (pairs + pairs.mT) / 2 + skew * (pairs - pairs.mT) / 2
    expected = expected + popularity * at_query @ k.mT + query_only * q @ at_key.mT + position * at_query @ at_key.mT
    assert (query @ key.mT - expected).abs().max() < (1e-12 if impl == "reference" else 1e-4)


def test_gradients_pass_through_the_reference_alone():
    given = [t.requires_grad_() for t in inputs(torch.float64, m=4, rank=4)]
    assert torch.autograd.gradcheck(lambda *t: widen(*t, GAINS["all"], 3, True, True), given)
    with pytest.raises(RuntimeError, match="is not for float64"):
        widen(*given, GAINS["all"], 3, True, True, None, "triton")
    with pytest.raises(RuntimeError, match="has no backward"):
        widen(*(t.float() for t in given), GAINS["all"], 3, True, True, None, "triton")


def test_bad_input_is_told(monkeypatch):
    given = inputs(torch.float32)
    with pytest.raises(ValueError, match="impl"):
        widen(*given, GAINS["all"], 45, True, True, None, "fast")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="needs a CUDA GPU, or TRITON_INTERPRET=1"):
        widen(*given, GAINS["all"], 45, True, True, None, "triton")
