"""The causal form: brute force, no look ahead, order, length, steps, and time linear in the tokens."""

import pytest
import torch

import keyquery as kq
from keyquery.learn.layers.primal import Random, causal
from tests.learn.layers.primal import oracle


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("features", ["cosine", "elu", Random(6, 10)])
@pytest.mark.parametrize("n", [1, 20, 75])
def test_causal_is_the_sum_over_earlier_tokens(features, n):
    """75 tokens are more than a chunk, and more than the 30 rows of We."""
    layer, x = oracle.make(features=features), tokens(2, n, 12)
    truth = torch.stack([oracle.causal(layer, sequence) for sequence in x])
    assert torch.allclose(layer(x, is_causal=True), truth, atol=1e-11)


def test_a_longer_input_changes_no_earlier_output():
    layer, x = oracle.make(), tokens(2, 150, 12)
    whole = layer(x, is_causal=True)
    for n in (1, 63, 64, 100):
        assert torch.allclose(layer(x[:, :n], is_causal=True), whole[:, :n], atol=1e-12)


def test_the_order_of_the_prefix_matters():
    layer, x = oracle.make(), tokens(1, 20, 12)
    order = torch.cat((torch.randperm(19), torch.tensor([19])))
    change = (layer(x[:, order], is_causal=True) - layer(x, is_causal=True))[:, -1]
    assert change.norm() > 0.01 * layer(x, is_causal=True)[:, -1].norm()


@pytest.mark.parametrize("sizes", [[1] * 80, [70, 1, 9], [3, 64, 13]])
def test_steps_equal_the_full_pass(sizes):
    layer = kq.PrimalAttention(12, 2, 3)
    x, state, parts = torch.randn(2, 80, 12), None, []
    with torch.no_grad():
        for part in x.split(sizes, 1):
            out, state = layer.step(part, state)
            parts.append(out)
        assert torch.allclose(torch.cat(parts, 1), layer(x, is_causal=True), atol=1e-5)
    assert state.seen.tolist() == [80, 80]
    assert state.total.shape == (2, 2, 2, 6, 3)  # both sides of p × s, whatever the length


@pytest.mark.parametrize("left", [False, True])
def test_padding_is_skipped(left):
    layer, x = oracle.make(), tokens(2, 90, 12)
    real = torch.ones(2, 90, dtype=torch.bool)
    real[0, : 70 if left else 0] = False
    real[0, 90 if left else 20 :] = False
    out = layer(x.masked_fill(~real.unsqueeze(-1), torch.nan), mask=real, is_causal=True)
    loss = layer.regularizer()
    alone = layer(x[:1, real[0]], is_causal=True)
    assert torch.allclose(out[0, real[0]], alone[0], atol=1e-12)
    first = layer.regularizer()
    layer(x[1:], is_causal=True)
    assert torch.allclose(loss, (first + layer.regularizer()) / 2)
    assert out[~real].abs().max() == 0


@pytest.mark.parametrize("data_dependent", [True, False])
def test_padding_is_skipped_in_steps(data_dependent):
    """Prompts padded on the left, holes, and a step in which only some samples have a token."""
    layer, x = oracle.make(data_dependent=data_dependent), tokens(3, 90, 12)
    real = torch.ones(3, 90, dtype=torch.bool)
    real[0, :70] = False
    real[1, ::3] = False
    real[2, 80:] = False
    dirty, state, parts = x.masked_fill(~real.unsqueeze(-1), torch.nan), None, []
    for here in (slice(0, 40), slice(40, 80), *(slice(i, i + 1) for i in range(80, 90))):
        before = state
        out, state = layer.step(dirty[:, here], state, mask=real[:, here])
        parts.append(out)
        if here.start == 85:
            assert torch.equal(state.total[:, 2], before.total[:, 2])
    found = torch.cat(parts, 1)
    assert torch.allclose(found, layer(dirty, mask=real, is_causal=True), atol=1e-12)
    for b in range(3):
        alone = layer(x[b : b + 1, real[b]], is_causal=True)
        assert torch.allclose(found[b, real[b]], alone[0], atol=1e-12)
    assert state.seen.tolist() == [20, 60, 80]
    assert found[~real].abs().max() == 0


def test_gradients_are_those_of_brute_force():
    layer, x = oracle.make(), tokens(1, 70, 12).requires_grad_()
    weights = [x, *(weight for weight in layer.parameters() if weight is not layer.log_lambda)]
    found = torch.autograd.grad(layer(x, is_causal=True).sin().sum(), weights)
    truth = torch.autograd.grad(oracle.causal(layer, x[0]).sin().sum(), weights)
    assert all(torch.allclose(ours, theirs, atol=1e-10) for ours, theirs in zip(found, truth, strict=True))


def test_the_loss_trains_also_here():
    layer = kq.PrimalAttention(12, 2, 3)
    (layer(torch.randn(2, 70, 12), is_causal=True).mean() + layer.regularizer()).backward()
    assert layer.log_lambda.grad.abs().min() > 0


def test_memory_is_linear_in_the_tokens():
    layer, peaks = kq.PrimalAttention(8, 1, 2), []
    for n in (2048, 8192):
        x = torch.randn(1, n, 8)
        with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
            layer(x, is_causal=True)
        peaks.append(max(event.cpu_memory_usage for event in profile.key_averages()))
    assert peaks[1] < 4.5 * peaks[0]
    assert causal.CHUNK <= 128


def test_what_has_no_causal_form():
    layer, x = oracle.make(loss="ksvd"), tokens(1, 5, 12)
    layer(x, is_causal=True)
    with pytest.raises(RuntimeError, match=r'loss="ksvd" does not support causal.*loss="paper" or is_causal=False'):
        layer.regularizer()
    with pytest.raises(RuntimeError, match="the last forward pass was causal"):
        layer.ksvd()


def test_without_data_dependence_a_step_is_a_forward():
    layer, x = oracle.make(data_dependent=False), tokens(2, 9, 12)
    out, state = layer.step(x[:, :4])
    more, state = layer.step(x[:, 4:], state)
    assert torch.allclose(torch.cat((out, more), 1), layer(x, is_causal=True), atol=1e-12)
    assert torch.equal(layer(x, is_causal=True), layer(x))
