"""Effective ranks and shares of a record, against the library's other ways to them."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.instruments.monitor.structure import SHARES, Ranks
from keyquery.layers import LanguageModel, Shape
from keyquery.listening.parts.on_data import score_variances
from keyquery.listening.parts.shares import score_shares
from keyquery.proof.families import tiny_model

NO_DROPOUT = {"t5": {"dropout_rate": 0.0}}


@pytest.mark.parametrize("rows", [4, 32])
@pytest.mark.parametrize("kind", ["kq", "llama", "gpt2", "bert", "t5", "gptj"])
def test_shares_are_those_of_look(kind, rows):
    """With means over all positions, and by position if there are enough sequences."""
    torch.manual_seed(0)
    shape = Shape(60, 32, 2, 4, 16, True, "general", rope=True)
    model = LanguageModel(shape) if kind == "kq" else tiny_model(kind, **NO_DROPOUT.get(kind, {}))
    ids, real = torch.randint(3, 60, (rows, 9)), torch.ones(rows, 9, dtype=torch.long)
    real[1, 6:] = 0
    batch = {"input_ids": ids, "attention_mask": real}
    batch |= {"decoder_input_ids": ids, "decoder_attention_mask": real} if kind == "t5" else {}
    heads = kq.read(model)
    expected = {
        heads[index].name: score_shares(sums).estimates
        for index, sums in score_variances(model, [batch], heads, list).items()
        if heads[index].on_data
    }
    for module in model.modules():
        module.p = 0.0  # of dropout
    monitor = kq.Monitor(model.train(), every=1, strict=True, on_alarm=lambda alarm: None)
    model(**batch)
    monitor.step()
    reading = monitor.reading()
    assert expected
    for name, estimates in expected.items():
        of_layer = [at for at, head in enumerate(reading.heads) if head["name"].rpartition(".")[0] == name]
        for part in SHARES:
            shown = [reading.curves[part][at][0] for at in of_layer]
            np.testing.assert_allclose(shown, estimates[part].value, rtol=1e-3, atol=1e-5, err_msg=f"{name} {part}")


def test_ranks_are_those_of_the_form():
    torch.manual_seed(0)
    layers = {str(heads): kq.read(kq.Attention(16, heads))[0] for heads in (1, 4)}
    ranks = Ranks(layers)
    assert ranks.done
    for name, layer in layers.items():
        exact = torch.linalg.svdvals(layer.form.dense().double())
        share = exact / exact.sum(-1, keepdim=True)
        expected = (-(share * share.clamp(min=1e-300).log()).sum(-1)).exp().flatten()
        torch.testing.assert_close(torch.from_numpy(ranks.result()[name]), expected, rtol=1e-5, atol=1e-5)


def test_ranks_belong_to_their_own_record():
    """A record whose ranks come late does not lend them to the next one."""
    torch.manual_seed(0)
    model = kq.Decoder(16, depth=2, heads=2).train()
    monitor = kq.Monitor(model, every=1, structure=2, strict=True, on_alarm=lambda alarm: None)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for _ in range(4):
        expected.append(kq.read(model)[1].form.effective_rank().flatten().tolist())
        model(torch.randn(2, 8, 16)).square().mean().backward()
        optimiser.step()
        monitor.step()
        optimiser.zero_grad()
    curves = monitor.reading().curves["effective_rank"]
    assert [curve[1] for curve in curves] == [None] * 4
    assert [curve[3] for curve in curves] == [None] * 4
    for record in (0, 2):
        assert [curve[record] for curve in curves[2:]] == pytest.approx(expected[record], rel=1e-5)
