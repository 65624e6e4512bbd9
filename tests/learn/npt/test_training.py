"""How NPT learns: what is hidden or spoilt at a step, what it costs, and that no step waits for the device."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import keyquery as kq
from keyquery.learn.inputs.tables import Rows
from keyquery.learn.npt.network import TableNetwork
from keyquery.learn.npt.training import Plan, Samples, drawing, losses, table_loss
from keyquery.learn.training.optimisers import make_optimiser

SMALL = {"embedding": 8, "depth": 2, "heads": 2, "device": "cpu", "random_state": 0}


def test_entries_are_hidden_or_spoilt_in_the_published_shares():
    n, sizes, generator = 20_000, (0, 4, 0), torch.Generator().manual_seed(0)
    rows = Rows(torch.full((n, 3), 9.0), torch.full((n, 3), 2), torch.zeros(n, 3, dtype=torch.bool))
    samples = Samples(rows, np.arange(n), np.arange(0), np.arange(0))
    batch = drawing(samples, sizes, Plan(target_share=0.3), 100, None)(0, generator)
    asked, given = batch.asked[0], Rows(*(part[0] for part in batch.rows))
    assert asked[:, :2].double().mean().item() == pytest.approx(0.15, abs=0.01)
    assert asked[:, 2].double().mean().item() == pytest.approx(0.3, abs=0.02)
    assert not given.hidden[~asked].any()
    assert (given.values[~asked] == 9).all()
    assert given.hidden[asked].double().mean().item() == pytest.approx(0.9, abs=0.02)
    spoilt = asked & ~given.hidden
    drawn = given.values[:, [0, 2]][spoilt[:, [0, 2]]]
    assert (abs(drawn.mean()) < 0.1, abs(drawn.std() - 1) < 0.1) == (True, True)
    counts = torch.bincount(given.codes[:, 1][spoilt[:, 1]], minlength=4)
    assert (counts / counts.sum() - 0.25).abs().max() < 0.1


def test_the_loss_is_its_definition():
    sizes = (0, 3, 0, 2)
    network, generator = TableNetwork(sizes, 8, 2, 2), torch.Generator().manual_seed(0)
    codes = torch.stack([torch.randint(max(size, 1), (40,)) for size in sizes], 1)
    rows = Rows(torch.randn(40, 4), codes, torch.rand(40, 4) < 0.1)
    rows.hidden[:, -1] = False
    weights = torch.rand(40) + 0.5
    samples = Samples(rows, np.arange(40), np.arange(0), np.arange(0), weights)
    batch = drawing(samples, sizes, Plan(), 10, None)(5, generator)
    h, sums, counts = network(*batch.rows)[0], [0.0, 0.0], [0, 0]
    for row, column in batch.asked[0].nonzero().tolist():
        if sizes[column]:
            cost = -network.logits(h[row, column], column).log_softmax(-1)[codes[row, column]].item()
        else:
            cost = (network.numbers(h[row, column], column) - rows.values[row, column]).item() ** 2
        cost *= weights[row].item() if column == 3 else 1.0
        kind = int(column < 3)
        sums[kind], counts[kind] = sums[kind] + cost, counts[kind] + 1
    found = [value.item() for value in losses(network, batch)]
    assert found == pytest.approx([sums[0] / counts[0], sums[1] / counts[1]], rel=1e-5)
    assert table_loss(network, batch).item() == pytest.approx((found[0] + found[1]) / 2, rel=1e-5)


def test_tall_tables_are_learned_by_parts():
    rows = Rows(torch.randn(90, 2), torch.zeros(90, 2, dtype=torch.long), torch.zeros(90, 2, dtype=torch.bool))
    samples = Samples(rows, np.arange(60), np.arange(60, 90), np.arange(60, 90))
    draw = drawing(samples, (0, 0), Plan(), 100, 30)
    trades = [draw(step, torch.Generator().manual_seed(step)).trade for step in (0, 50, 100)]
    assert trades == pytest.approx([1.0, 0.5, 0.0])  # features count first, and targets last
    batch = draw(0, torch.Generator().manual_seed(0))
    assert batch.asked.shape == (1, 30, 2)
    assert batch.rows.hidden[0, 20:, -1].all()  # a third of them, as in the table, without their targets
    assert not batch.asked[0, 20:, -1].any()
    assert batch.asked[0, :20, -1].any()


class Ops(TorchDispatchMode):
    """Every operation of torch, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("most", [None, 30])
def test_a_step_never_waits_for_the_device(most):
    sizes = (0, 3, 2)
    network = TableNetwork(sizes, 8, 2, 2)
    codes = torch.stack([torch.randint(max(size, 1), (60,)) for size in sizes], 1)
    rows = Rows(torch.randn(60, 3), codes, torch.zeros(60, 3, dtype=torch.bool))
    draw = drawing(Samples(rows, np.arange(40), np.arange(40, 60), np.arange(40, 60)), sizes, Plan(), 10, most)
    optimiser = make_optimiser("npt", network, 1e-3, 0.0)
    generator = torch.Generator().manual_seed(0)
    with Ops() as seen:
        table_loss(network, draw(0, generator)).backward()
        optimiser.step()
    assert "aten.native_layer_norm.default" in seen.names  # it has seen the whole of it
    asked = [name for name in seen.names if any(word in name for word in ("local_scalar", "nonzero", "item", "unique"))]
    assert asked == []


def test_where_all_targets_are_hidden_none_is_ever_seen():
    rows = Rows(torch.randn(200, 3), torch.zeros(200, 3, dtype=torch.long), torch.zeros(200, 3, dtype=torch.bool))
    samples = Samples(rows, np.arange(150), np.arange(150, 200), np.arange(150, 200))
    batch = drawing(samples, (0, 0, 0), Plan(target_share=1.0), 10, None)(0, torch.Generator().manual_seed(0))
    assert batch.rows.hidden[..., -1].all()
    assert batch.asked[0, :, -1].tolist() == [True] * 150 + [False] * 50
    spoilt = batch.asked & ~batch.rows.hidden
    assert spoilt[..., :-1].any()  # of features, some are replaced as ever

    class Hidden(kq.NPTRegressor):
        plan = Plan(target_share=1.0)

    X = np.random.default_rng(0).normal(size=(40, 2))
    model = Hidden(**SMALL, steps=4).fit(X, X[:, 0])
    assert model.context_.hidden[:, -1].all()
    assert model.explain(X[:1], rows=1).rows[0]["target"] is None
