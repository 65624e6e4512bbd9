"""The causal form: brute force, no look ahead, order, length, and memory linear in the tokens."""

import pytest
import torch

import keyquery as kq
from tests.learn.layers.primal import oracle


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("features", ["cosine", "elu"])
@pytest.mark.parametrize("n", [1, 20, 75])
def test_causal_is_the_sum_over_earlier_tokens(features, n):
    """75 tokens are more than a chunk, and more than the 30 rows of We."""
    layer, x = oracle.make(features=features), tokens(2, n, 12).requires_grad_()
    weights = [x, *(weight for weight in layer.parameters() if weight is not layer.log_lambda)]
    found, truth = layer(x, is_causal=True), torch.stack([oracle.causal(layer, sequence) for sequence in x])
    assert torch.allclose(found, truth, atol=1e-11)
    grads = (torch.autograd.grad(out.sin().sum(), weights) for out in (found, truth))
    assert all(torch.allclose(ours, theirs, atol=1e-10) for ours, theirs in zip(*grads, strict=True))


def test_a_longer_input_changes_no_earlier_output_and_order_matters():
    layer, x = oracle.make(), tokens(2, 150, 12)
    whole = layer(x, is_causal=True)
    for n in (1, 63, 64, 100):
        assert torch.allclose(layer(x[:, :n], is_causal=True), whole[:, :n], atol=1e-12)
    order = torch.cat((torch.randperm(19), torch.tensor([19])))
    change = layer(x[:, order], is_causal=True)[:, -1] - whole[:, 19]
    assert change.norm() > 0.01 * whole[:, 19].norm()


@pytest.mark.parametrize("left", [False, True])
def test_padding_is_skipped(left):
    layer, x = oracle.make(), tokens(2, 90, 12)
    real = torch.ones(2, 90, dtype=torch.bool)
    real[0, : 70 if left else 0] = False
    real[0, 90 if left else 20 :] = False
    options = {"is_causal": True, "return_loss": True}
    out, loss = layer(x.masked_fill(~real.unsqueeze(-1), torch.nan), mask=real, **options)
    alone, first = layer(x[:1, real[0]], **options)
    assert torch.allclose(out[0, real[0]], alone[0], atol=1e-12)
    assert torch.allclose(loss, (first + layer(x[1:], **options)[1]) / 2)
    assert out[~real].abs().max() == 0


def test_memory_is_linear_in_the_tokens():
    layer, peaks = kq.PrimalAttention(8, 1, 2), []
    for n in (2048, 8192):
        x = torch.randn(1, n, 8)
        with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
            layer(x, is_causal=True)
        peaks.append(max(event.cpu_memory_usage for event in profile.key_averages()))
    assert peaks[1] < 4.5 * peaks[0]
