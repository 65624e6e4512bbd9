"""Effective ranks and shares of a record, against the library's other ways to them."""

import pytest
import torch

import keyquery as kq
from keyquery.instruments.monitor.interception import Seen
from keyquery.instruments.monitor.structure import SHARES, Ranks, part_shares


@pytest.mark.parametrize("rope", [None, kq.Rope(8), kq.Rope(8, interleaved=True, factor=1.2)], ids=str)
def test_layers_computed_as_one_have_the_shares_of_each(rope):
    torch.manual_seed(0)
    modules = {"one": kq.Attention(16, 2, rope=rope), "two": kq.Attention(16, 2, rope=rope, kernel="split")}
    modules["grouped"] = kq.Attention(16, 4, kv_heads=2, head_dim=8, rope=rope)
    layers = {name: kq.read(module)[0] for name, module in modules.items()}
    inputs = {name: torch.randn(40, 16) + 0.3 for name in modules}
    seen = {name: Seen(tokens=x, length=40) for name, x in inputs.items()}
    results = part_shares(layers, seen)
    for name, module in modules.items():
        expected = module.double().parts(inputs[name].double()[None])
        for part in SHARES:
            torch.testing.assert_close(results[name][part], expected[part].double(), rtol=1e-4, atol=1e-6)


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
