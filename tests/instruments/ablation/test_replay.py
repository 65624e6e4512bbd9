"""Measurements with the layers below reused are those of whole runs, bit for bit; other wirings run as before."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.instruments.ablation import measure
from keyquery.instruments.ablation.measure import Measurement
from keyquery.instruments.ablation.replay import from_block
from keyquery.layers import LanguageModel

BATCHES = [{"input_ids": torch.arange(160).reshape(16, 10) + start} for start in (300, 900)]


@pytest.mark.parametrize("by", ["head", "layer", "all"])
@pytest.mark.few(1)
def test_ablations_are_those_of_whole_runs(by, monkeypatch):
    model = LanguageModel.load(kq.models.DECODER)
    changes = ["skew", "mean", "singular direction 1", "keys 2"]
    options = {"heads": ["0.1", "3.*"], "by": by, "means": "global", "changes": changes, "measure": "all"}
    reused = kq.ablate(model, BATCHES, **options)
    monkeypatch.setattr(Measurement, "_below", lambda self, site: nullcontext())
    assert kq.ablate(model, BATCHES, **options).rows == reused.rows


def test_blocks_below_are_computed_only_for_the_record(monkeypatch):
    monkeypatch.setattr(measure, "TOKENS", {})  # one ablation at a time
    model = LanguageModel.load(kq.models.DECODER)
    blocks = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    calls = [0] * len(blocks)
    for number, block in enumerate(blocks):

        def counted(*args, number=number, forward=block.forward, **kwargs):
            calls[number] += 1
            return forward(*args, **kwargs)

        monkeypatch.setattr(block, "forward", counted)
    kq.ablate(model, BATCHES[:1], heads="3.*", changes=["skew", "symmetric"], means="global", measure="all")
    assert calls[0] < calls[3] - 4


class Skipping(nn.Module):
    """A model whose second block sees the first one's input as well."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.seen = []

    def forward(self, x):
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        return self.blocks[2](second + first)


def test_blocks_that_are_connected_otherwise_are_all_run():
    model, x = Skipping(), torch.randn(2, 3)
    whole = model(x)
    with from_block(model, "blocks.2", lambda: model(x)) as skipped:
        assert not skipped
        assert torch.equal(model(x), whole)
    with from_block(model, "blocks.1", lambda: model(x)) as skipped:
        assert skipped
        with torch.no_grad():
            model.blocks[0].weight.zero_()
        assert torch.equal(model(x), whole)
    assert not torch.equal(model(x), whole)
