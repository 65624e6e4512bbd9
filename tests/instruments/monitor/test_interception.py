"""Attention is heard by its name where it has one, and by a function mode where it has not."""

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import keyquery as kq
from keyquery.instruments.monitor import named_calls

bound = functional.scaled_dot_product_attention  # as `from torch.nn.functional import scaled_dot_product_attention`


class Doubled(TorchFunctionMode):
    """Queries twice as long, as interventions on attention have them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.scaled_dot_product_attention:
            args = (2 * args[0], *args[1:])
        return func(*args, **(kwargs or {}))


class Attention(kq.Attention):
    """Calls attention in one of several ways."""

    how = "name"

    def forward(self, x):
        query, key = self.queries_and_keys(x)
        if self.how == "name":
            return functional.scaled_dot_product_attention(query, key, key)
        if self.how == "bound name":
            return bound(query, key, key)
        if self.how == "method":
            return (query @ key.mT * self.scale).softmax(-1) @ key
        with Doubled():
            return functional.scaled_dot_product_attention(query, key, key)


def largest(layer, x):
    query, key = layer.queries_and_keys(x)
    return (query @ key.mT * layer.scale).amax((0, 2, 3)).tolist()


@pytest.mark.parametrize("how", ["name", "bound name", "method", "mode of others"])
def test_every_way_to_call_attention_is_heard_once(how):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Attention(8, 2)).train()
    model[0].how, x = how, torch.randn(2, 5, 8)
    monitor = kq.Monitor(model, every=1, strict=True, on_alarm=lambda alarm: None)
    for _ in range(3):
        model(x)
        monitor.step()
    expected = [(2 if how == "mode of others" else 1) * value for value in largest(model[0], x)]
    curves = monitor.reading().curves
    for head, value in enumerate(expected):
        assert curves["largest"][head] == pytest.approx([value] * 3, rel=1e-5)
    assert bool(monitor._named) == (how == "name")
    assert not named_calls._REPLACED
    assert functional.scaled_dot_product_attention is bound


def test_a_model_that_changes_how_it_calls_attention_loses_one_record():
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Attention(8, 2)).train(), torch.randn(2, 5, 8)
    monitor = kq.Monitor(model, every=1, on_alarm=lambda alarm: None)
    for step in range(4):
        model[0].how = "name" if step == 0 else "bound name"
        if step == 1:
            with pytest.warns(RuntimeWarning, match="0 calls attention in another way than before"):
                model(x)
        else:
            model(x)
        monitor.step()
    assert monitor.reading().steps == [0, 2, 3]


def test_replaced_parameters_are_read_anew():
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(kq.Attention(8, 2)).train(), torch.randn(2, 5, 8)
    monitor = kq.Monitor(model, every=1, strict=True, on_alarm=lambda alarm: None)
    for change in (
        lambda: None,
        lambda: model[0].key.weight.data.mul_(3.0),
        lambda: setattr(model[0].key.weight, "data", 2 * model[0].key.weight.data),
        lambda: setattr(model[0], "query", torch.nn.Linear(8, 8)),
        lambda: model.double(),
    ):
        change()
        model(x.to(model[0].key.weight.dtype)).square().sum().backward()
        gradient = model[0].key.weight.grad.unflatten(0, (2, 4)).norm(dim=(1, 2)).tolist()
        monitor.step()
        model.zero_grad()
        values = monitor.recorder.records[-1]["values"]
        exact = torch.linalg.matrix_norm(kq.read(model)[0].form.dense().double(), 2)
        assert values["sigma"] == pytest.approx(exact.tolist(), rel=1e-5)
        assert values["key_gradient"] == pytest.approx(gradient, rel=1e-5)
