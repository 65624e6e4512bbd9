"""Streamed logit statistics against float64 brute force; the bound is never below the exact maximum."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.checkpoints.layer import Layer, Norm, Projections
from keyquery.forms import Rope
from keyquery.instruments.monitor import statistics
from keyquery.instruments.monitor.bound import largest_eigenvalue, logit_bounds, product_core
from keyquery.instruments.monitor.statistics import STATISTICS, call_statistics
from keyquery.instruments.monitor.step import Seen, Step
from keyquery.listening.call import Call, Tokens


def call_of(query, key, scale, mask=None, causal=False, rows=None, **options):
    """A call of attention with these tensors."""
    module, (n, m) = torch.nn.Identity(), (query.shape[-2], key.shape[-2])
    tokens = Tokens(torch.arange(n)[None], torch.arange(m)[None], rows)
    given = {"attn_mask": mask, "causal": 0 if causal else None, **options}
    return Call(module, "", 0, query, key, None, scale, tokens, **given)


def statistics_of(*tensors, **options):
    return call_statistics(call_of(*tensors, **options))


def logits_of(query, key, scale, mask, causal):
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1).double()
    logits = query.double() @ key.mT * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.double()
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return logits


def brute(logits):
    visible = logits > -1e30
    some = visible.any(-1)
    weights = logits.softmax(-1).nan_to_num(0)
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
    first = visible.any(-2).int().argmax(-1)
    sink = weights.gather(-1, first[:, :, None, None].expand(-1, -1, logits.shape[2], 1))[..., 0]
    uniform = visible.sum(-1).clamp(min=1).double().log()
    sums = [each.where(some, 0.0).sum((0, 2)) for each in (entropy, sink, uniform)]
    smallest = logits.masked_fill(~visible, torch.inf).amin((0, 2, 3))
    rows = [logits.amax((0, 2, 3)), smallest, *sums, some.sum((0, 2)).double()]
    return torch.stack(rows)


def masks(kind, n, m):
    if kind == "left padding":
        mask = torch.ones(3, 1, n, m, dtype=torch.bool)
        mask[0, :, :, :5] = False
        return mask
    if kind == "added":
        mask = torch.randn(1, 4, n, m) * 2
        mask[..., -7:] = torch.finfo(torch.float32).min
        return mask
    if kind == "query without keys":
        mask = torch.rand(3, 1, n, m) > 0.5
        mask[1, 0, 3] = False
        return mask
    return None


CASES = [
    (150, 150, 4, True, None),
    (40, 90, 2, False, None),
    (33, 33, 2, True, "left padding"),
    (40, 65, 4, False, "added"),
    (20, 20, 4, False, "query without keys"),
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("n", "m", "kv", "causal", "kind"), CASES)
def test_statistics_are_those_of_the_whole_matrix_of_real_queries(n, m, kv, causal, kind, padded, monkeypatch):
    monkeypatch.setattr(statistics, "CELLS", 500)  # many blocks
    torch.manual_seed(0)
    query, key, mask = torch.randn(3, 4, n, 24) * 3, torch.randn(3, kv, m, 24) * 3, masks(kind, n, m)
    rows = torch.rand(3, n) > 0.3 if padded else torch.ones(3, n, dtype=torch.bool)
    query[~rows[:, None].expand(-1, 4, -1)] *= 1e3
    every = logits_of(query, key, 0.2, mask, causal)
    truth = brute(every.masked_fill(~rows[:, None, :, None], -torch.inf))
    rows = rows if padded else None
    found = statistics_of(query, key, 0.2, mask, causal, rows).double()
    assert torch.allclose(found[:2], truth[:2], rtol=1e-5, atol=1e-5)
    assert torch.allclose(found[2:], truth[2:], rtol=1e-5, atol=1e-4)
    whole = statistics_of(query, key, None, rows=rows, given_scores=every.masked_fill(every < -1e30, -torch.inf))
    assert torch.allclose(whole[:2], truth[:2], rtol=1e-12)
    assert torch.allclose(whole[2:], truth[2:], rtol=1e-9)


def test_a_nan_is_not_taken_for_a_masked_key():
    query = torch.ones(1, 2, 3, 4)
    query[0, 1, 2, 0] = torch.nan
    found = statistics_of(query, torch.ones(1, 2, 3, 4), 1.0)
    assert found[0, 0] == 4
    assert found[[0, 1], 1].isnan().all()


def test_entropy_of_huge_logits_does_not_cancel():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 2, 20, 8) * 3e4
    key[:, :, 5] = key[:, :, 6]  # two equal logits: an entropy of up to log 2
    found = statistics_of(query, key, 1.0)
    assert torch.allclose(found[2:4].double(), brute(logits_of(query, key, 1.0, None, False))[2:4], atol=1e-5)


def test_memory_does_not_grow_with_the_square(monkeypatch):
    sizes = []
    scores = Call.scores
    monkeypatch.setattr(Call, "scores", lambda call: sizes.append((out := scores(call)).numel()) or out)
    monkeypatch.setattr(statistics, "CELLS", 2**14)
    statistics_of(torch.randn(1, 2, 2048, 4), torch.randn(1, 2, 2048, 4), 1.0, causal=True)
    assert max(sizes) <= 2**14
    assert sum(sizes) == 2 * 2048**2


def layer_of(generator, rope, biased, normed, shared=3):
    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    biases = (draw(2, shared, 8) * 2, draw(2, 1, 8) * 2) if biased else (None, None)
    weights = Projections(draw(2, shared, 8, 12), draw(2, 1, 8, 12), *biases)
    norms = {name: Norm("rms", draw(1, 1, 8)) for name in ("query_norm", "key_norm")} if normed else {}
    facts = {"index": 0, "name": "a", "kind": "self", "causal": False, "weights": weights, "scale": 0.3}
    return Layer(**facts, rope=rope, position="rope" if rope else "none", **norms)


@pytest.mark.parametrize("rope", [None, Rope(8), Rope(4, factor=1.3)], ids=["none", "whole", "partial"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_the_bound_is_never_below_the_largest_logit(rope, biased, normed):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        layer = layer_of(generator, rope, biased, normed)
        # Inputs along the top singular directions, which come near the bound, and random ones.
        top = torch.linalg.svd(layer.form.dense().flatten(0, -3))[0][..., 0].flatten(0, -2)
        x = torch.cat((top, -top, torch.randn(30, 12, generator=generator, dtype=torch.float64)))
        x = 3 * x / x.norm(dim=-1, keepdim=True)
        places = torch.arange(len(x))
        query, key = layer.rotated(x, x, rope, places, places)
        largest = layer.scale * (query @ key.mT).amax((-2, -1)).flatten()
        assert (largest <= logit_bounds({"": layer}, {"": 3.0})[""].bound * (1 + 1e-12)).all()


def test_without_rotation_the_bound_is_reached():
    layer = kq.read(kq.Attention(8, 2, bias=False).double())[0]
    left, values, right = torch.linalg.svd(layer.form.dense())
    bound = logit_bounds({"": layer}, {"": 2.0})[""]
    assert torch.allclose(bound.sigma, values[:, 0])
    reached = layer.scale * torch.einsum("hi,hij,hj->h", 2 * left[..., 0], layer.form.dense(), 2 * right[:, 0])
    assert torch.allclose(bound.bound, reached)


def test_norms_by_squaring_are_those_of_the_singular_values():
    torch.manual_seed(0)
    query, key = torch.randn(2, 5, 16, 40, dtype=torch.float64)
    squares = torch.linalg.matrix_norm(query.mT @ key, 2).square()
    assert torch.allclose(largest_eigenvalue(product_core(query, key)), squares, rtol=1e-6)
    query[1, 3], key[2] = torch.nan, torch.inf
    assert largest_eigenvalue(product_core(query, key)).isnan().tolist() == [False, True, True, False, False]


def test_bounds_are_held_to_the_rounding_of_their_own_layer():
    """A logit a little above its bound: by the rounding of bfloat16, or by more than that of float32."""
    step, values = Step(), {"bound": torch.ones(1)}
    for name, dtype in {"short": torch.bfloat16, "whole": torch.float32}.items():
        step.seen[name] = Seen(dtype, 1.0, [torch.full((len(STATISTICS), 1), 1.01)], values=values)
    bound = step.columns()["bound"]
    assert bound[0] == 1
    assert np.isnan(bound[1])
