"""A primal layer within a step of training: whose loss is asked, with which gradient, and what stays in memory."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import keyquery as kq
from tests.learn.layers.primal import oracle


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_a_call_whose_loss_was_never_asked_is_warned_of_once():
    layer, x = oracle.make(), tokens(1, 9, 12)
    layer(layer(x))
    with pytest.warns(UserWarning, match=r"called again before its regularizer\(\) was read"):
        layer.regularizer()
    assert layer.regularizer().isfinite()  # and not again


def test_replicas_of_one_layer_are_warned_of():
    layer, x = oracle.make(), tokens(1, 9, 12)
    for _ in range(2):
        replica = layer._replicate_for_data_parallel()  # as nn.DataParallel does; it then gives them their weights
        replica.directions, replica.log_lambda = layer.directions * 1, layer.log_lambda * 1
        replica(x)
    with pytest.warns(UserWarning, match="use DistributedDataParallel"):
        layer.regularizer()


def test_a_replica_elsewhere_is_refused():
    layer = oracle.make()
    replica = layer._replicate_for_data_parallel()
    for name, part in oracle.make().to("meta").named_children():
        replica.add_module(name, part)
    replica.directions, replica.log_lambda = layer.directions.to("meta"), layer.log_lambda.to("meta")
    replica(tokens(1, 9, 12).to("meta"))
    with pytest.raises(RuntimeError, match="weights have moved to another device since, or a replica ran it"):
        layer.regularizer()


def step_by_step(layer, x):
    """Gradient accumulation: the loss of every call is asked, weights change after two of them."""
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        for part in x.split(1):
            (layer(part).sum() + layer.regularizer()).backward()
        optimiser.step()


def checkpointed(layer, x):
    """A checkpoint of what goes on after the layer calls it once more, within backward."""
    model = nn.Sequential(layer, nn.Linear(12, 12, dtype=torch.float64), nn.Tanh())
    for part in x.split(1):
        (checkpoint(model, part, use_reentrant=False).sum() + layer.regularizer()).backward()


def without_the_loss(layer, x):
    """Steps of training that do not ask, and a last one that does."""
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        layer(x).sum().backward()
        optimiser.step()
    layer(x)
    layer.regularizer()


def evaluation(layer, x):
    for _ in range(2):
        layer.eval()(x)
    layer.regularizer()
    with torch.no_grad():
        for _ in range(2):
            layer.train()(x)
        layer.regularizer()


def between(layer, x):
    """Evaluation before a step of training."""
    with torch.no_grad():
        layer(x)
    layer(x)
    layer.regularizer()


@pytest.mark.parametrize("run", [step_by_step, checkpointed, without_the_loss, evaluation, between])
def test_loops_that_are_right_are_not_warned_of(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(oracle.make(), tokens(2, 9, 12))


def test_a_hook_gathers_the_losses_of_shared_weights():
    layer, x, losses = oracle.make(), tokens(1, 9, 12), []
    layer.register_forward_hook(lambda layer, args, out: losses.append(layer.regularizer()))
    middle = layer(x)
    layer(middle)
    alone = [layer.eta * oracle.objective(layer, given[0]).square().mean() for given in (x, middle)]
    assert torch.allclose(torch.stack(losses), torch.stack(alone))


def test_a_forward_without_gradients_has_no_loss_to_train_with():
    layer, x = oracle.make(), tokens(1, 9, 12).requires_grad_()
    layer(x)
    value = layer.regularizer().item()
    complaint = "regularizer has no gradient: the last forward pass ran under"
    checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=complaint):
        layer.regularizer()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            layer(x)
            assert layer.regularizer().item() == pytest.approx(value)
        with pytest.raises(RuntimeError, match=complaint):
            layer.regularizer()
        loss = layer.eval().regularizer()
        assert loss.item() == pytest.approx(value)
        assert not loss.requires_grad  # rather than half of a gradient
        layer.train()


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_checkpoint_has_the_same_gradients(is_causal):
    layer, x = oracle.make(), tokens(2, 40, 12)
    found = []
    for reentrant in (None, False, True):

        def run(x):
            out = layer(x, is_causal=is_causal)
            return out.sin().sum(), layer.regularizer()

        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out, loss = run(leaf) if reentrant is None else checkpoint(run, leaf, use_reentrant=reentrant)
        (out + loss).backward()
        found.append([leaf.grad, *(weight.grad.clone() for weight in layer.parameters())])
    for others in found[1:]:
        assert all(torch.allclose(ours, theirs) for ours, theirs in zip(others, found[0], strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_leaves_the_layer_as_its_first_run_did(reentrant):
    layer, x = oracle.make(), tokens(1, 9, 12).requires_grad_()

    def run(x):
        out = layer(x)
        loss = layer.regularizer()
        return layer(out).tanh().sum() + loss + layer.regularizer()

    loss = checkpoint(run, x, use_reentrant=reentrant)
    before = layer._last.batches
    loss.backward()
    assert layer._last.batches is before


def kept(layer):
    """Bytes that the layer holds of its last forward, whole storages counted."""
    parts = [part for batch in layer._last.batches for part in batch if isinstance(part, torch.Tensor)]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_kept_does_not_grow_with_the_tokens(is_causal):
    layer, sizes = kq.PrimalAttention(16, 2, 3), []
    for n in (100, 3200):
        with torch.no_grad():
            layer(torch.randn(2, n, 16), mask=torch.ones(2, n, dtype=torch.bool), is_causal=is_causal)
        sizes.append(kept(layer))
    assert sizes[0] == sizes[1] > 0


class Held:
    """What autograd saves, seen from outside."""

    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_backward_frees_all_that_a_forward_saved(is_causal, checkpointed):
    """The layer's last batch is still there for `ksvd`, without what its graph was computed from."""
    layer, saved = kq.PrimalAttention(16, 2, 3), []

    def hold(tensor):
        held = Held(tensor)
        saved.append(weakref.ref(held))
        return held

    after = nn.Linear(16, 16)

    def run(x):
        return after(layer(x, is_causal=is_causal)).tanh()

    x = torch.randn(1, 500, 16)
    given = weakref.ref(x)
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda held: held.tensor):
        out = checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)
        loss = out.sum() + layer.regularizer()
    assert sum(ref() is not None for ref in saved) > 3
    loss.backward()
    del x, out, loss
    gc.collect()
    assert given() is None
    assert [ref for ref in saved if ref() is not None] == []
    assert kept(layer) > 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_layer_on_the_meta_device_tells_shapes(is_causal):
    layer, x = kq.PrimalAttention(12, 2, 3, features="random", device="meta"), torch.empty(2, 9, 12, device="meta")
    assert layer(x, mask=torch.ones(2, 9, dtype=torch.bool, device="meta"), is_causal=is_causal).shape == (2, 9, 12)
    assert layer.regularizer().is_meta
    layer.load_state_dict(kq.PrimalAttention(12, 2, 3, features="random").state_dict(), assign=True)
    assert layer(torch.randn(2, 9, 12)).isfinite().all()


def test_moved_layers_are_asked_after_a_new_forward():
    layer = kq.PrimalAttention(12, 2, 3, loss="ksvd")
    layer(torch.randn(1, 9, 12))
    layer.double()
    with pytest.raises(RuntimeError, match="weights have changed since"):
        layer.regularizer()
    layer(tokens(1, 9, 12))
    assert layer.regularizer().dtype == torch.float64


def test_frozen_layers_pass_gradients_on():
    layer, x = oracle.make().requires_grad_(False), tokens(1, 9, 12).requires_grad_()
    expected = torch.autograd.grad(oracle.forward(layer, x[0]).sum() + oracle.objective(layer, x[0]).square().mean(), x)
    found = torch.autograd.grad(layer(x).sum() + layer.regularizer() / layer.eta, x)
    assert torch.allclose(found[0], expected[0])


def test_a_model_of_none_or_nested_layers():
    layer = oracle.make()
    model = nn.ModuleDict({"a": layer, "b": layer})  # one layer under two names
    layer(tokens(1, 9, 12))
    assert torch.equal(kq.regularizer(model), layer.regularizer())
