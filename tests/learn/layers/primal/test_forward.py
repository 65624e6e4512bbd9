"""Outputs of kq.PrimalAttention: equal to brute force, blind to padding, any length, packed or not."""

import copy
import pickle

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.learn.layers.primal import Random
from keyquery.testing import check_kernel
from tests.learn.layers.primal import oracle

FEATURES = ["cosine", "elu", "random"]


class Loss(nn.Module):
    """Output and loss in one call."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, real):
        return self.layer(x, mask=real), self.layer.regularizer()


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("data_dependent", [True, False])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("n", [1, 7, 41])
def test_forward_is_the_sum_over_tokens(features, data_dependent, n):
    layer, x = oracle.make(features=features, data_dependent=data_dependent), tokens(2, n, 12)
    truth = torch.stack([oracle.forward(layer, sequence) for sequence in x])
    assert (layer(x) - truth).abs().max() < 1e-12 * truth.abs().max()


def test_features_of_another_width_make_the_sample_too():
    layer, x = oracle.make(features=Random(6, 10)), tokens(2, 41, 12)
    assert layer.width == 10
    truth = torch.stack([oracle.forward(layer, sequence) for sequence in x])
    assert torch.allclose(layer(x), truth, atol=1e-12)


@pytest.mark.parametrize("features", FEATURES)
def test_padding_changes_nothing(features):
    """Valid outputs, the loss and all gradients are those of the real tokens alone, whatever padding holds."""
    layer, x = oracle.make(features=features).eval(), tokens(2, 50, 12)
    real = torch.rand(2, 50) < 0.7
    dirty = x.masked_fill(~real.unsqueeze(-1), torch.nan)
    alone = [layer(x[b, real[b]].unsqueeze(0))[0] for b in range(2)]
    out = layer(dirty, mask=real)
    assert torch.allclose(out[real], torch.cat(alone), atol=1e-12)
    assert out[~real].abs().max() == 0
    losses = [oracle.objective(layer, x[b, real[b]]).square().mean() for b in range(2)]
    assert torch.allclose(layer.regularizer(), layer.eta * torch.stack(losses).mean())
    (out.square().sum() + layer.regularizer()).backward()
    assert all(weight.grad.isfinite().all() for weight in layer.parameters())
    found = [weight.grad.clone() for weight in layer.parameters()]
    layer.zero_grad()
    noise = 100 * tokens(2, 50, 12)
    again = layer(x.where(real.unsqueeze(-1), noise), mask=real)
    assert torch.equal(again, out)
    (again.square().sum() + layer.regularizer()).backward()
    assert all(torch.equal(weight.grad, old) for weight, old in zip(layer.parameters(), found, strict=True))


def test_a_sample_without_tokens_gives_zero_and_does_not_count():
    layer, x = oracle.make(), tokens(3, 9, 12)
    real = torch.ones(3, 9, dtype=torch.bool)
    real[1] = False
    out, loss = layer(x, mask=real), layer.regularizer()
    assert out[1].abs().max() == 0
    layer(x[[0, 2]])
    assert torch.allclose(loss, layer.regularizer())
    layer(x, mask=torch.zeros_like(real))
    assert layer.regularizer().item() == 0


def test_a_full_mask_is_no_mask():
    layer, x = oracle.make(), tokens(2, 33, 12)
    assert torch.allclose(layer(x, mask=torch.ones(2, 33, dtype=torch.bool)), layer(x), atol=1e-14)


@pytest.mark.parametrize("data_dependent", [True, False])
def test_order_and_mixing(data_dependent):
    """Data-independent weights mix no tokens; data-dependent ones do, and know the order."""
    layer, x = oracle.make(data_dependent=data_dependent), tokens(1, 20, 12)
    other = x.clone()
    other[0, 1:] = tokens(19, 12)
    assert torch.equal(layer(x)[0, 0], layer(other)[0, 0]) == (not data_dependent)
    order = torch.cat((torch.tensor([0]), 1 + torch.randperm(19)))
    assert torch.allclose(layer(x[:, order])[:, 0], layer(x)[:, 0]) == (not data_dependent)


def test_packed_sequences_are_those_alone():
    layer, x = oracle.make().eval(), tokens(60, 12)
    offsets = torch.tensor([0, 1, 30, 30, 37, 60])
    parts = [part for part in x.split(offsets.diff().tolist()) if len(part)]
    for is_causal in (False, True):
        alone = torch.cat([layer(part[None], is_causal=is_causal)[0] for part in parts])
        assert torch.allclose(layer(x, offsets=offsets, is_causal=is_causal), alone, atol=1e-12)
    layer(x, offsets=offsets)
    losses = torch.stack([oracle.objective(layer, part).square().mean() for part in parts])
    assert torch.allclose(layer.regularizer(), layer.eta * losses.mean())
    assert layer(x[:0], offsets=torch.tensor([0, 0])).shape == (0, 12)
    assert layer(x[None, :0]).shape == (1, 0, 12)


def test_a_zero_query_gives_zero_scores_and_no_gradient_explodes():
    layer = oracle.make(bias=False)
    x = tokens(1, 9, 12)
    x[0, 4] = 0
    x.requires_grad_()
    out = layer(x)
    assert torch.allclose(out[0, 4], layer.output(layer.concat.bias.repeat(2)))
    (out.sum() + layer.regularizer()).backward()
    assert x.grad.abs().max() < 1e3


def test_gradients_are_those_of_brute_force():
    layer, x = oracle.make(), tokens(1, 34, 12).requires_grad_()
    for loss in (layer(x).sin().sum() + layer.regularizer(), None):
        if loss is None:
            loss = oracle.forward(layer, x[0]).sin().sum() + layer.eta * oracle.objective(layer, x[0]).square().mean()
            truth = torch.autograd.grad(loss, [x, *layer.parameters()])
        else:
            found = torch.autograd.grad(loss, [x, *layer.parameters()])
    for ours, theirs in zip(found, truth, strict=True):
        assert (ours - theirs).abs().max() < 1e-10 * (1 + theirs.abs().max())


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("loss", ["paper", "ksvd"])
def test_gradcheck(features, loss):
    layer, x = oracle.make(8, 2, 2, features=features, loss=loss), tokens(2, 6, 8).requires_grad_()
    real = torch.ones(2, 6, dtype=torch.bool)
    real[0, 2:4] = False
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *weights):
        given = dict(zip(names, weights, strict=True))
        loss = Loss(layer)
        return torch.func.functional_call(loss, {f"layer.{name}": weight for name, weight in given.items()}, (x, real))

    weights = [weight.detach().clone().requires_grad_() for weight in layer.parameters()]
    torch.autograd.gradcheck(run, (x, *weights), fast_mode=True)


@pytest.mark.parametrize(("n", "most"), [(128, 3.6), (256, 3.3), (512, 3.2), (4096, 3.1)])
def test_bytes_saved_for_backward(n, most):
    """At most four numbers a token and dimension: queries, keys, heads' outputs.

    Beside these three stand matrices of a fixed size, less and less of it with more tokens.
    """
    dim = 512
    layer, x = kq.PrimalAttention(dim, 8, 30), torch.randn(1, n, dim, requires_grad=True)
    own = {x.data_ptr(), *(weight.data_ptr() for weight in layer.parameters())}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = layer(x).sum() + layer.regularizer()
    assert sum(saved.values()) <= most * 4 * n * dim
    loss.backward()


class Adapted(nn.Module):
    """A linear map and a low-rank change of it, as adapters wrap it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.change = base, nn.Parameter(0.3 * tokens(base.out_features, base.in_features))

    def forward(self, x):
        return self.base(x) + x @ self.change.mT


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("part", ["query_key", "concat", "output"])
def test_a_replaced_or_hooked_projection_is_called(part, is_causal):
    layer, x, heard = oracle.make(), tokens(2, 40, 12), []
    real = torch.rand(2, 40) < 0.8
    expected = layer(x, mask=real, is_causal=is_causal)
    loss = layer.regularizer()
    handle = getattr(layer, part).register_forward_hook(lambda module, args, out: heard.append(out))
    assert torch.allclose(layer(x, mask=real, is_causal=is_causal), expected, atol=1e-12)
    assert torch.allclose(layer.regularizer(), loss)
    assert heard
    handle.remove()
    setattr(layer, part, Adapted(getattr(layer, part)))
    found = layer(x, mask=real, is_causal=is_causal)
    adapted = getattr(layer, part)
    with torch.no_grad():  # the same map as one matrix
        adapted.base.weight += adapted.change
    setattr(layer, part, adapted.base)
    assert not torch.allclose(found, expected)
    assert torch.allclose(layer(x, mask=real, is_causal=is_causal), found, atol=1e-12)
    setattr(layer, part, nn.utils.parametrizations.weight_norm(adapted.base))
    assert torch.allclose(layer(x, mask=real, is_causal=is_causal), found, atol=1e-12)


@pytest.mark.parametrize("part", ["query_key", "concat", "output"])
def test_gradients_are_heard_and_a_forward_of_ones_own_is_called(part):
    layer, x, heard = oracle.make(), tokens(1, 40, 12), []
    expected, module = layer(x), getattr(layer, part)
    handle = module.register_full_backward_hook(lambda module, before, after: heard.append(after))
    layer(x.clone().requires_grad_()).sum().backward()
    assert heard
    handle.remove()
    module.forward = lambda given: nn.functional.linear(given, -module.weight, module.bias)
    assert (layer(x) - expected).norm() > 0.1 * expected.norm()
    del module.forward
    layer.concat = nn.Linear(6, 6, bias=False, dtype=torch.float64)
    found = layer(x)
    layer.concat.bias = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    assert torch.allclose(layer(x), found, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_called_map_under_autocast(is_causal):
    layer, x = kq.PrimalAttention(32, 4, 5), torch.randn(2, 70, 32)
    expected = layer(x, is_causal=is_causal)
    layer.concat.register_forward_hook(lambda module, args, out: None)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x, is_causal=is_causal)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 0.02 * expected.norm()


def test_copies_and_files_leave_the_last_batch_behind():
    layer = oracle.make()
    layer(tokens(1, 5, 12))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with pytest.raises(RuntimeError, match="call the layer first"):
            other.regularizer()


def test_autocast_and_short_floats():
    layer, x = kq.PrimalAttention(32, 4, 5), torch.randn(2, 70, 32)
    exact, loss = layer(x), layer.regularizer()
    with torch.autocast("cpu", torch.bfloat16):
        out, short = layer(x), layer.regularizer()
        assert (layer(x.bfloat16()) - out).norm() < 0.02 * exact.norm()
    assert out.dtype == torch.bfloat16
    assert short.dtype == torch.float32
    assert (out.float() - exact).norm() < 0.02 * exact.norm()
    assert torch.allclose(short, loss, rtol=0.05)
    half = copy.deepcopy(layer).to(torch.bfloat16)(x.bfloat16())
    assert (half.float() - exact).norm() < 0.02 * exact.norm()
    assert kq.PrimalAttention(32, 4, 5, dtype=torch.bfloat16).we.dtype == torch.bfloat16


@pytest.mark.slow
def test_promises():
    check_kernel(kq.PrimalAttention(12, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("features", ["elu", "random", Random(6, 10)])
def test_promises_with_other_features(features):
    check_kernel(kq.PrimalAttention(12, 2, 2, features=features))


def test_the_check_notices_that_data_independent_weights_mix_no_tokens():
    with pytest.raises(AssertionError, match="does not look back"):
        check_kernel(kq.PrimalAttention(12, 2, 2, data_dependent=False))
