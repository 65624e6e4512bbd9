"""kq.PrimalAttention against brute force: outputs, losses and gradients, padding, replaced projections, errors."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import keyquery as kq
from keyquery.testing import check_kernel
from tests.learn.layers.primal import oracle

FEATURES = ["cosine", "elu"]


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("data_dependent", [True, False])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("n", [1, 7, 41])
def test_forward_and_gradients_are_those_of_the_sum_over_tokens(features, data_dependent, n):
    layer = oracle.make(features=features, data_dependent=data_dependent)
    x = tokens(2, n, 12).requires_grad_()
    out, loss = layer(x, return_loss=True)
    expected = torch.stack([oracle.forward(layer, sequence) for sequence in x])
    losses = torch.stack([oracle.objective(layer, sequence) for sequence in x])
    truth = expected, layer.eta * losses.square().mean()
    found = [out, loss, *torch.autograd.grad(out.sin().sum() + loss, [x, *layer.parameters()])]
    truth = [*truth, *torch.autograd.grad(truth[0].sin().sum() + truth[1], [x, *layer.parameters()])]
    for ours, theirs in zip(found, truth, strict=True):
        assert (ours - theirs).abs().max() < 1e-10 * (1 + theirs.abs().max())


@pytest.mark.parametrize("features", FEATURES)
def test_padding_changes_nothing(features):
    """Valid outputs, the loss and all gradients are those of the real tokens alone, whatever padding holds."""
    layer, x = oracle.make(features=features), tokens(3, 50, 12)
    real = torch.rand(3, 50) < 0.7
    real[2] = False  # a sample without tokens gives 0 and does not count
    found = []
    for noise in (torch.nan, 100.0):
        layer.zero_grad()
        out, loss = layer(x.masked_fill(~real.unsqueeze(-1), noise), mask=real, return_loss=True)
        (out.square().sum() + loss).backward()
        found.append([out, loss, *(weight.grad for weight in layer.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    alone = torch.cat([oracle.forward(layer, x[b, real[b]]) for b in range(2)])
    losses = torch.stack([oracle.objective(layer, x[b, real[b]]).square().mean() for b in range(2)])
    truth = alone, layer.eta * losses.mean()
    gradients = torch.autograd.grad(truth[0].square().sum() + truth[1], list(layer.parameters()))
    for ours, theirs in zip([out[real], *found[0][1:]], [*truth, *gradients], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10)
    assert out[~real].abs().max() == 0
    assert layer(x, mask=torch.zeros_like(real), return_loss=True)[1] == 0
    assert torch.allclose(layer(x, mask=torch.ones_like(real)), layer(x), atol=1e-14)


def test_a_zero_query_gives_zero_scores_and_no_gradient_explodes():
    layer, x = oracle.make(bias=False), tokens(1, 9, 12)
    x[0, 4] = 0
    out, loss = layer(x.requires_grad_(), return_loss=True)
    assert torch.allclose(out[0, 4], layer.output(layer.concat.bias.repeat(2)))
    (out.sum() + loss).backward()
    assert x.grad.abs().max() < 1e3


@pytest.mark.parametrize("is_causal", [False, True])
def test_autocast_and_short_floats(is_causal):
    layer, x = kq.PrimalAttention(32, 4, 5), torch.randn(2, 70, 32)
    exact, loss = layer(x, is_causal=is_causal, return_loss=True)
    hooked = copy.deepcopy(layer)
    hooked.concat.register_forward_hook(lambda module, args, out: None)
    for given in (layer, hooked):
        with torch.autocast("cpu", torch.bfloat16):
            out, short = given(x, is_causal=is_causal, return_loss=True)
        assert (out.dtype, short.dtype) == (torch.bfloat16, torch.float32)
        assert (out.float() - exact).norm() < 0.02 * exact.norm()
        assert torch.allclose(short, loss, rtol=0.05)
    half = copy.deepcopy(layer).to(torch.bfloat16)(x.bfloat16(), is_causal=is_causal)
    assert (half.float() - exact).norm() < 0.02 * exact.norm()
    assert kq.PrimalAttention(32, 4, 5, dtype=torch.bfloat16).we.dtype == torch.bfloat16


def test_kq_regularizer_sums_over_a_model():
    layer = kq.PrimalAttention(12, 2, 3)
    model = nn.Sequential(layer, nn.Linear(12, 12), kq.PrimalAttention(12, 2, 3, eta=0.3), layer)
    model(torch.randn(2, 20, 12))
    assert torch.allclose(kq.regularizer(model), model[0].regularizer() + model[2].regularizer())
    assert kq.regularizer(nn.Linear(2, 2)).item() == 0
    with pytest.raises(RuntimeError, match="the layer was not called: its regularizer needs a forward pass"):
        kq.regularizer(nn.Sequential(model, oracle.make()))


def test_a_forward_without_gradients_has_no_loss_to_train_with():
    layer, x = oracle.make(), tokens(1, 9, 12).requires_grad_()
    value = layer(x, return_loss=True)[1].item()
    complaint = "regularizer has no gradient: the last forward pass ran under"
    checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=complaint):
        layer.regularizer()
    with torch.no_grad():
        layer(x)
        assert layer.regularizer().item() == pytest.approx(value)
    with pytest.raises(RuntimeError, match=complaint):
        kq.regularizer(layer)
    assert layer.eval().regularizer().item() == pytest.approx(value)


@pytest.mark.slow
@pytest.mark.parametrize("features", FEATURES)
def test_promises(features):
    check_kernel(kq.PrimalAttention(12, 2, 2, features=features))


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_adapter_of_the_map_of_scores_is_called(is_causal):
    layer, x = oracle.make(), tokens(2, 40, 12)
    options = {"mask": torch.rand(2, 40) < 0.8, "is_causal": is_causal, "return_loss": True}
    change = 0.3 * tokens(6, 6)
    handle = layer.concat.register_forward_hook(lambda module, args, out: out + args[0] @ change.mT)
    found = layer(x, **options)
    handle.remove()
    with torch.no_grad():  # the same map as one matrix
        layer.concat.weight += change
    assert all(torch.allclose(*pair, atol=1e-12) for pair in zip(layer(x, **options), found, strict=True))
    assert all(not part._loss for part in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))))


# The causal form


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("n", [1, 20, 150])
def test_causal_is_the_sum_over_earlier_tokens(features, n):
    """150 tokens are more than two chunks, and more than the 30 rows of We."""
    layer, x = oracle.make(features=features), tokens(2, n, 12).requires_grad_()
    weights = [x, *(weight for weight in layer.parameters() if weight is not layer.log_lambda)]
    found, truth = layer(x, is_causal=True), torch.stack([oracle.causal(layer, sequence) for sequence in x])
    assert torch.allclose(found, truth, atol=1e-11)
    grads = (torch.autograd.grad(out.sin().sum(), weights) for out in (found, truth))
    assert all(torch.allclose(ours, theirs, atol=1e-10) for ours, theirs in zip(*grads, strict=True))


@pytest.mark.parametrize("left", [False, True])
def test_padding_is_skipped_by_the_causal_form(left):
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


def test_memory_of_the_causal_form_is_linear_in_the_tokens():
    layer, peaks = kq.PrimalAttention(8, 1, 2), []
    for n in (2048, 8192):
        x = torch.randn(1, n, 8)
        with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
            layer(x, is_causal=True)
        peaks.append(max(event.cpu_memory_usage for event in profile.key_averages()))
    assert peaks[1] < 4.5 * peaks[0]


# What is refused


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"rank": 5}, "rank must be at most 4, the width of a head"),
        ({"heads": 3}, "3 does not divide 8"),
        ({"eta": -0.1}, "eta must be at least 0, got -0.1"),
        ({"features": "cosin"}, "did you mean 'cosine'"),
        ({"loss": "kvsd"}, "did you mean 'ksvd'"),
        ({"impl": "cuda"}, "impl must be one of"),
    ],
)
def test_bad_construction(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        kq.PrimalAttention(**{"dim": 8, "heads": 2, "rank": 2, **options})


@pytest.mark.unchecked
def test_bad_calls():
    layer, x = kq.PrimalAttention(8, 2, 2), torch.zeros(2, 5, 8)
    with pytest.raises(ValueError, match=r"x must be \(batch, n, 8\), got \(2, 5, 9\)"):
        layer(torch.zeros(2, 5, 9))
    for mask in (torch.ones(2, 5), torch.ones(2, 4).bool()):
        with pytest.raises(ValueError, match=r"mask must be bool \(2, 5\), True for real tokens, got torch"):
            layer(x, mask)
    for options in ({"loss": "ksvd"}, {"impl": "triton"}):
        with pytest.raises(ValueError, match="causal attention has no loss"):
            kq.PrimalAttention(8, 2, 2, **options)(x, is_causal=True)
    x[0, 4] = torch.nan
    with pytest.raises(ValueError, match="x has queries or keys that are not finite"):
        layer.ksvd(x)
    assert layer.ksvd(x, mask=~x.isnan().any(-1)).heads  # padding may hold anything
