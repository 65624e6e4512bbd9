"""What is attached to a model that is listened to: every adapter alike, nothing left behind, errors in a sentence."""

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import keyquery as kq
from keyquery.proof.families import tiny_model
from tests.instruments.plain import GPT
from tests.listening.models import (
    CausalSelfAttention,
    Core,
    FusedAttention,
    Residual,
    assert_as_it_was,
    assert_one_sentence,
    randomised,
    snapshot,
)


def layers():
    return kq.Decoder(16, depth=2, heads=2, rope=kq.Rope(8)).double().eval(), (torch.randn(2, 5, 16).double(),)


def interface():
    model = tiny_model("llama").double()
    model.set_attn_implementation("sdpa")
    return model, (torch.randint(3, 60, (2, 5)),)


def functions():
    return randomised(GPT()), (torch.randint(3, 60, (2, 5)),)


def torch_layers():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return randomised(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)), (torch.randn(2, 5, 16).double(),)


ADAPTERS = {"interface": interface, "layers": layers, "functions": functions, "torch": torch_layers}


@pytest.fixture(params=ADAPTERS)
def adapter(request):
    model, inputs = ADAPTERS[request.param]()

    def run():
        out = model(*inputs)
        return out if isinstance(out, torch.Tensor) else out[0]

    return model, run


def assert_same(model, given, expected):
    """Equal; but without gradients torch runs its encoder as one kernel, and rounds otherwise."""
    if isinstance(model, nn.TransformerEncoder):
        torch.testing.assert_close(given, expected)
    else:
        assert torch.equal(given, expected)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", ["listening", "replacing", "failing", "interrupted", "refused", "nested"])
def test_a_model_is_given_back_bit_for_bit(adapter, name, gradients):
    model, run = adapter

    def fail(call):
        if call.layer == 1:
            raise ZeroDivisionError if name == "failing" else KeyboardInterrupt

    with torch.set_grad_enabled(gradients):
        before, plain = snapshot(model), run()
        match name:
            case "listening":
                with kq.listen(model):
                    assert_same(model, run(), plain)
            case "replacing":
                with kq.listen(model, lambda call: {"output": -call.output()}):
                    assert not torch.allclose(run(), plain)
            case "failing" | "interrupted":
                with pytest.raises((ZeroDivisionError, KeyboardInterrupt)), kq.listen(model, fail):
                    run()
            case "refused":
                short = kq.listen(model, lambda call: {"query": call.query[:, :, 1:]})
                with pytest.raises(ValueError, match="replaced query") as error, short:
                    run()
                assert_one_sentence(error)
            case "nested":
                with kq.listen(model), kq.listen(model, lambda call: {"value": 2 * call.value}), kq.listen(model):
                    run()
        assert_as_it_was(model, before)
        assert torch.equal(run(), plain)


def test_a_listener_inside_of_a_listener_sees_what_the_outer_one_replaced(adapter):
    model, run = adapter

    def outer(call):
        return {"query": 2 * call.query, "value": call.value + 1} if call.layer == 0 else {"output": call.output() - 3}

    with torch.no_grad():
        with kq.listen(model) as plain:
            run()
        with kq.listen(model, outer):
            alone = run()
            with kq.listen(model) as inner:
                assert torch.equal(run(), alone)
            with (
                kq.listen(
                    model, lambda call: {"query": call.query / 2, "value": call.value - 1} if not call.layer else None
                ),
                kq.listen(model) as undone,
            ):
                run()
    torch.testing.assert_close(inner[0].query, 2 * plain[0].query)
    torch.testing.assert_close(inner[0].value, plain[0].value + 1)
    second = inner[1]
    own = second.weights() @ second.values()
    torch.testing.assert_close(second.output(), own - 3)
    torch.testing.assert_close(undone[0].output(), plain[0].output())
    torch.testing.assert_close(undone[1].query, plain[1].query)


def test_scores_of_an_outer_listener_change_with_queries_of_an_inner_one(adapter):
    """Scores with a term, then half the queries: the product is halved, the term stays."""
    model, run = adapter

    def half(call):
        product = call.scale * (call.query @ call.keys().mT)
        return {"scores": call.scores() - product / 2 + call.key_positions[:, None, None]}

    outer = kq.listen(model, lambda call: {"scores": call.scores() + call.key_positions[:, None, None]})
    inner = kq.listen(model, lambda call: {"query": call.query / 2})
    with torch.no_grad(), outer, inner:
        both = run()
    with torch.no_grad(), kq.listen(model, half):
        torch.testing.assert_close(run(), both, atol=1e-9, rtol=1e-7)


def test_inference_mode(adapter):
    model, run = adapter
    with torch.inference_mode():
        plain = run()
        with kq.listen(model) as calls:
            assert_same(model, run(), plain)
        outputs = [call.output() for call in calls]
        with kq.listen(model, lambda call: {"query": call.query.clone()}):
            torch.testing.assert_close(run(), plain)
    with kq.listen(model) as usual:
        run()
    for call, other, output in zip(calls, usual, outputs, strict=True):
        torch.testing.assert_close(output, other.output())
        torch.testing.assert_close(call.scores(), other.scores())
        assert call.is_causal == other.is_causal


def test_two_threads_at_once_are_refused(adapter):
    model, run = adapter
    started, ended, errors = threading.Event(), threading.Event(), []

    def wait(call):
        started.set()
        assert ended.wait(20)

    def other():
        try:
            run()
        except Exception as error:
            errors.append(error)

    before = snapshot(model)
    with kq.listen(model, wait):
        thread = threading.Thread(target=other)
        thread.start()
        assert started.wait(20)
        try:
            with pytest.raises(RuntimeError, match="run one after the other") as error:
                run()
        finally:
            ended.set()
            thread.join()
        assert_one_sentence(error)
        run()  # one after the other
    assert errors == []
    assert_as_it_was(model, before)


def test_a_call_outside_of_the_forward_is_refused(adapter):
    model, run = adapter
    with torch.no_grad(), kq.listen(model) as calls:
        run()
    module = model.get_submodule(calls[0].name)
    entered = []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: entered.append((args, kwargs)), with_kwargs=True)
    run()
    hook.remove()
    before = snapshot(model)
    (args, kwargs), *_ = entered
    message = "outside of the model's forward: call the model itself"
    with pytest.raises(RuntimeError, match=message) as error, kq.listen(model):
        module(*args, **kwargs)
    assert_one_sentence(error)
    assert_as_it_was(model, before)
    module(*args, **kwargs)


def test_a_model_without_attention_is_refused_once_it_ran():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    before = snapshot(model)
    with kq.listen(model) as calls:
        assert calls == []
    with pytest.raises(ValueError, match="Sequential ran without an attention call") as error, kq.listen(model):
        model(torch.randn(2, 8))
    assert_one_sentence(error)
    assert_as_it_was(model, before)


class OutsideOfTorch(torch.autograd.Function):
    """Attention by numpy."""

    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = (t.detach().numpy() for t in (q, k, v))
        scores = q @ k.swapaxes(-1, -2) / 2
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return torch.from_numpy(weights / weights.sum(-1, keepdims=True) @ v)


class ForeignAttention(Core):
    def __init__(self):
        super().__init__(OutsideOfTorch.apply, 16)


def test_attention_outside_of_torch_is_said():
    """By an error if there is no other, else by a warning that names the layer."""
    x = torch.randn(2, 5, 16).double()
    model = randomised(Residual(ForeignAttention()))
    before, plain = snapshot(model), model(x)
    with pytest.raises(ValueError, match="outside of torch") as error, kq.listen(model):
        model(x)
    assert_one_sentence(error)
    assert_as_it_was(model, before)
    assert torch.equal(model(x), plain)
    model = randomised(Residual(CausalSelfAttention(), ForeignAttention()))
    with (
        pytest.warns(UserWarning, match=r"attentions\.1 of Residual ran, but none of its attention"),
        kq.listen(model) as calls,
    ):
        model(x)
    assert [call.name for call in calls] == ["attentions.0"]


class TwoDevices(nn.Module):
    """Its second half on another device."""

    def __init__(self, device):
        super().__init__()
        self.first, self.second = FusedAttention(16, 4), CausalSelfAttention().to(device)
        self.device = device

    def forward(self, x):
        return self.second(self.first(x).to(self.device))


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = pytest.param("cuda", marks=(pytest.mark.gpu, NO_GPU))


@pytest.mark.parametrize("device", ["meta", CUDA])
def test_a_model_on_two_devices(device):
    """Every call is on the device of its layer."""
    model, x = TwoDevices(device), torch.randn(2, 5, 16)
    with torch.no_grad(), kq.listen(model) as calls:
        model(x)
    assert [call.query.device.type for call in calls] == ["cpu", device]
    assert [call.positions.device.type for call in calls] == ["cpu", device]
    with torch.no_grad(), kq.listen(model, lambda call: {"query": 2 * call.query}):
        assert model(x).device.type == device


@pytest.mark.parametrize("device", ["cpu", CUDA])  # whose backward pass is in another thread
@pytest.mark.parametrize("name", ["functions", "interface", "layers"])
def test_activation_checkpointing_is_refused_where_attention_is_changed(name, device):
    """In the backward pass padding and positions are not known; listening alone sees every call once."""
    torch.use_deterministic_algorithms(device == "cpu")
    (model, inputs), gradients = ADAPTERS[name](), []
    model, inputs = model.to(device), [x.to(device) for x in inputs]
    block = {"functions": "h.0", "interface": "layers.0", "layers": "blocks.0"}[name]
    block = model.get_submodule(block)
    whole, before = block.forward, snapshot(model)

    def run():
        out = model(*inputs)
        return (out if isinstance(out, torch.Tensor) else out[0]).square().sum()

    def again(*args, **kwargs):
        return checkpoint(whole, *args, use_reentrant=False, **kwargs)

    for forward in (whole, again):
        block.forward = forward
        model.zero_grad()
        with kq.listen(model) as calls:
            run().backward()
        assert len(calls) == 2
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)
    with (
        pytest.raises(RuntimeError, match="turn activation checkpointing off") as error,
        kq.listen(model, lambda call: {"query": 1.5 * call.query}),
    ):
        run().backward()
    assert_one_sentence(error)
    del block.forward
    assert_as_it_was(model, before)
