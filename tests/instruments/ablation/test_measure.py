"""Ablations that run as one batch, or without the layers below, are those of whole runs; other models run as before."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.instruments.ablation import measure
from keyquery.instruments.ablation.losses import default_loss, next_token_loss
from keyquery.instruments.ablation.measure import Measurement, from_block
from keyquery.layers import LanguageModel
from keyquery.proof.families import tiny_model

IDS = torch.arange(160).reshape(16, 10)
PADDED = {"input_ids": IDS + 900, "attention_mask": (torch.arange(10) < torch.arange(16)[:, None] % 5 + 5).long()}


def rows_alone_and_together(model, batches, monkeypatch, loss=next_token_loss, **options):
    """Rows one at a time and in batches, and how many model calls the latter took."""
    calls = []
    hook = model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(1), with_kwargs=True)
    with monkeypatch.context() as patch:
        patch.setattr(measure, "TOKENS", {})
        alone = kq.ablate(model, batches, loss, measure="all", **options).rows
        single = len(calls)
        calls.clear()
        patch.setattr(measure, "TOKENS", {"cpu": 7 * 160})
        together = kq.ablate(model, batches, loss, measure="all", **options).rows
    hook.remove()
    return alone, together, len(calls) / single


def assert_same(alone, together):
    assert [(row["layer"], row["head"], row["part"]) for row in alone] == [
        (row["layer"], row["head"], row["part"]) for row in together
    ]
    for single, other in zip(alone, together, strict=True):
        assert [other[name] for name in ("change", "low", "high")] == pytest.approx(
            [single[name] for name in ("change", "low", "high")], abs=2e-6
        )


@pytest.mark.parametrize(("by", "means"), [("head", "position"), ("layer", "global"), ("all", "position")])
def test_many_at_a_time_are_those_of_one_at_a_time(by, means, monkeypatch):
    model = LanguageModel.load(kq.models.DECODER)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batches = [{"input_ids": IDS + 300}, PADDED]
    untouched = [next_token_loss(model, batch) for batch in batches]
    changes = ["skew", "zero", "symmetric", "position" if means == "position" else "uniform", "popularity"]
    alone, together, calls = rows_alone_and_together(
        model, batches, monkeypatch, heads=None if by == "all" else ["0.*", "2.*"], by=by, means=means, changes=changes
    )
    assert_same(alone, together)
    assert len({round(row["change"], 9) for row in together}) > len(together) / 2
    assert calls < 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(next_token_loss(model, batch), old) for batch, old in zip(batches, untouched, strict=True))
    assert "_call_impl" not in vars(model)


FAMILIES = {"llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM", "bloom": "BloomForCausalLM"}
FAMILIES |= {"gpt2": "GPT2LMHeadModel", "t5": "T5ForConditionalGeneration"}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers(family, monkeypatch):
    model = tiny_model(family, model=FAMILIES[family])
    batch = {**PADDED, "input_ids": torch.randint(3, 60, (16, 10), generator=torch.Generator().manual_seed(0))}
    batch |= {"decoder_input_ids": batch["input_ids"]} if family == "t5" else {}
    alone, together, calls = rows_alone_and_together(model, [batch], monkeypatch, heads="0.*", means="global")
    assert_same(alone, together)
    assert calls < 1


def test_masked_tokens_are_the_same_for_every_ablation(monkeypatch):
    """The tokens that a loss masks depend on the shape of its batch, which must not be that of the repeated one."""
    encoder, tokenizer = LanguageModel.load(kq.models.ENCODER), Tokenizer.load(kq.models.ENCODER)
    loss = default_loss(encoder, tokenizer)
    alone, together, calls = rows_alone_and_together(
        encoder, [{"input_ids": IDS + 300}], monkeypatch, loss, heads="1.*", means="global"
    )
    assert_same(alone, together)
    assert calls < 1


class Mixing(nn.Module):
    """A language model in which sequences of a batch see each other."""

    def __init__(self):
        super().__init__()
        self.inner = LanguageModel.load(kq.models.DECODER)

    def forward(self, input_ids):
        logits = self.inner(input_ids=input_ids)
        return logits + logits.mean(0, keepdim=True)


def test_sequences_that_see_each_other_run_one_at_a_time(monkeypatch):
    model = Mixing().eval()
    alone, together, calls = rows_alone_and_together(
        model, [{"input_ids": IDS + 300}], monkeypatch, heads="1.*", means="global", changes=["popularity", "symmetric"]
    )
    assert alone == together
    assert calls > 1  # the batch that was tried, and given up


def test_memory_that_does_not_suffice_halves_the_batch(monkeypatch):
    model = LanguageModel.load(kq.models.DECODER)
    rows = []

    def limit(module, args, kwargs):
        ids = args[0] if args else kwargs["input_ids"]
        rows.append(len(ids))
        if len(ids) > 50:
            raise torch.OutOfMemoryError

    hook = model.register_forward_pre_hook(limit, with_kwargs=True)
    alone, together, _ = rows_alone_and_together(
        model, [{"input_ids": IDS + 300}], monkeypatch, heads="2.*", means="global"
    )
    hook.remove()
    assert_same(alone, together)
    assert {7 * 16, 3 * 16} <= set(rows)


BATCHES = [{"input_ids": torch.arange(100).reshape(10, 10) + start} for start in (300, 600, 900)]


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
