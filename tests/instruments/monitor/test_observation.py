"""What a recorded forward shows, of any model, whatever its padding; and that it leaves no trace in the model."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.listening.tokens import Run
from keyquery.proof.families import tiny_model
from tests.instruments.monitor.models import language_model, monitored
from tests.instruments.plain import GPT

pytest.importorskip("transformers")

LOGITS = ("largest", "smallest", "entropy", "relative_entropy", "sink", "input_norm")


class Encoder(nn.Module):
    """torch's encoder over embedded tokens, sequence first."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(60, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), 2, None, False)

    def forward(self, ids, attention_mask=None):
        hidden = None if attention_mask is None else attention_mask == 0
        return self.encoder(self.tokens(ids.T), src_key_padding_mask=hidden)


BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "encoder": Encoder,
    "llama": lambda: tiny_model("llama"),
    "bert": lambda: tiny_model("bert", **BERT),
    "kq": language_model,
}


def traces(model):
    """What a listener could leave in a model."""
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return [
        (name, key)
        for name, module in model.named_modules()
        for key in ("forward", "attend_by", *hooks)
        if (vars(module)[key] if key in hooks else key in vars(module))
    ]


@pytest.mark.parametrize("kind", MODELS)
def test_padding_does_not_count(kind):
    ids = torch.randint(60, (3, 7), generator=torch.Generator().manual_seed(0))
    lengths, model = (7, 4, 2), MODELS[kind]().train()
    curves = {}
    for side in ("alone", "right", "left"):
        monitor = monitored(model)
        if side == "alone":
            for row, length in zip(ids, lengths, strict=True):
                model(row[None, :length])
        else:
            padded, real = torch.full((3, 7), 59), torch.zeros(3, 7, dtype=torch.long)
            for row, length in enumerate(lengths):
                chosen = slice(7 - length, 7) if side == "left" else slice(length)
                padded[row, chosen], real[row, chosen] = ids[row, :length], 1
            model(padded, attention_mask=real, **positions(kind, real))
        monitor.step()
        curves[side] = monitor.reading().curves
        monitor.close()
    for side in ("right", "left"):
        for metric in LOGITS:
            np.testing.assert_allclose(
                curves[side][metric], curves["alone"][metric], rtol=2e-5, atol=2e-6, err_msg=f"{side} {metric}"
            )


def positions(kind, real):
    """BERT counts positions from the first slot, unless it is given them."""
    return {"position_ids": (real.cumsum(1) - 1).clamp(min=0)} if kind == "bert" else {}


def test_learned_sinks_count_for_the_entropy_alone():
    torch.manual_seed(0)
    model = tiny_model("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"]).train()
    model.layers[0].self_attn.sinks.data.copy_(torch.tensor([0.0, 1.0, 2.0, 50.0]))
    monitor = monitored(model)
    with kq.listen(model) as calls:
        model(torch.randint(60, (2, 6)))
    monitor.step()
    curves, weights = monitor.reading().curves, calls[0].weights().double()
    rest = 1 - weights.sum(-1, keepdim=True)
    entropy = torch.special.entr(torch.cat((weights, rest), -1)).sum(-1).mean((0, 2))
    np.testing.assert_allclose([curve[0] for curve in curves["entropy"]], entropy.tolist(), atol=1e-5)
    np.testing.assert_allclose([curve[0] for curve in curves["sink"]], weights[..., 0].mean((0, 2)).tolist(), atol=1e-6)
    assert max(curve[0] for curve in curves["largest"]) < 40


def test_an_error_while_listening_does_not_reach_the_model(monkeypatch):
    model, ids = GPT().train(), torch.randint(60, (2, 6))
    expected, _ = model(ids)
    monitor = kq.Monitor(model, every=1)
    monkeypatch.setattr(Run, "tokens", lambda *args: 1 / 0)
    with pytest.warns(RuntimeWarning, match="training goes on: division by zero"):
        assert torch.equal(model(ids)[0], expected)
    monitor.step()
    assert traces(model) == []


def test_an_interrupted_forward_is_no_record():
    model, ids = GPT().train(), torch.randint(60, (2, 6))
    monitor = monitored(model)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    hook = model.h[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(10 * ids % 60)
    hook.remove()
    assert traces(model) == []
    model(ids)
    monitor.step()
    with pytest.raises(ValueError, match="cannot be clipped, its weights are not read"):
        monitor.clip()
    with kq.listen(model) as calls:
        model(ids)
    largest = calls[0].scores().amax((0, 2, 3))
    assert [curve[0] for curve in monitor.reading().curves["largest"]][:4] == pytest.approx(largest.tolist(), rel=1e-5)


def test_copies_and_other_monitors_are_independent():
    model, ids = GPT().train(), torch.randint(60, (2, 6))
    first, second = monitored(model), monitored(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.wte.weight.mul_(10)
        assert not torch.equal(other(ids)[0], model(ids)[0])
    first.close()
    model(ids)
    second.step()
    assert second.reading().steps == [0]
    second.close()
    assert "_compiled_call_impl" not in vars(model)


def test_a_forward_that_is_not_seen_is_said_once():
    monitor = kq.Monitor(GPT(), every=1)
    with pytest.warns(RuntimeWarning, match="the monitor saw no forward of GPT in training mode before step 0"):
        monitor.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.step()


def test_replaced_parameters_are_read_anew():
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(kq.Attention(8, 4, kv_heads=2, bias=False)).train(), torch.randn(2, 5, 8)
    monitor = monitored(model)
    for change in (
        lambda: None,
        lambda: model[0].key.weight.data.mul_(3.0),
        lambda: setattr(model[0].key.weight, "data", 2 * model[0].key.weight.data),
        lambda: setattr(model[0], "query", torch.nn.Linear(8, 8, bias=False)),
        lambda: model.double(),
    ):
        change()
        model(x.to(model[0].key.weight.dtype)).square().sum().backward()
        queries, keys = (
            side.weight.grad.unflatten(0, (-1, 2)).norm(dim=(1, 2)) for side in (model[0].query, model[0].key)
        )
        monitor.step()
        model.zero_grad()
        values = monitor.recorder.records[-1]["values"]
        exact = torch.linalg.matrix_norm(kq.read(model)[0].form.dense().double(), 2)
        assert values["sigma"] == pytest.approx(exact.flatten().tolist(), rel=1e-5)
        assert values["query_gradient"] == pytest.approx(queries.tolist(), rel=1e-5)
        assert values["key_gradient"] == pytest.approx(keys.repeat_interleave(2).tolist(), rel=1e-5)
