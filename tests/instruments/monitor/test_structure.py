"""Effective ranks and shares of a record, against the library's other ways to them."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.instruments.monitor.structure import SHARES, effective_ranks
from keyquery.listening.inputs.batches import read_lines, text_batches
from keyquery.listening.inputs.load import load_model
from keyquery.listening.parts.on_data import score_variances
from keyquery.listening.parts.shares import score_shares
from keyquery.proof.families import tiny_model
from tests.instruments.monitor.models import language_model, monitored

NO_DROPOUT = {"t5": {"dropout_rate": 0.0}}


def recorded(model, *batches):
    """What a monitor shows of forwards of one step."""
    for module in model.modules():
        module.p = 0.0  # of dropout
    monitor = monitored(model.train())
    for batch in batches:
        model(**batch)
    monitor.step()
    return monitor.reading()


@pytest.mark.parametrize("kind", ["kq", "llama", "gpt2", "bert", "t5", "gptj"])
def test_shares_are_those_of_the_variance_of_scores(kind):
    rows, model = 32, language_model() if kind == "kq" else tiny_model(kind, **NO_DROPOUT.get(kind, {}))
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
    reading = recorded(model, batch)
    assert expected
    for name, estimates in expected.items():
        of_layer = [at for at, head in enumerate(reading.heads) if head["name"].rpartition(".")[0] == name]
        for part in SHARES:
            shown = [reading.curves[part][at][0] for at in of_layer]
            np.testing.assert_allclose(shown, estimates[part].value, rtol=1e-3, atol=1e-5, err_msg=f"{name} {part}")


def windows(model):
    """The model, and 32 windows of text, one of them shorter than the others."""
    model, tokenizer = load_model(model)
    return model, next(text_batches(read_lines(kq.models.LONG_TEXT), tokenizer, 64, size=32))


def split(batch, size):
    return [{name: x[first : first + size] for name, x in batch.items()} for first in range(0, 32, size)]


def test_the_bundled_decoder_has_the_shares_of_its_look():
    model, batch = windows(kq.models.DECODER)
    cells, curves = kq.look(model, inputs=batch).heads, recorded(model, batch).curves
    for part in SHARES:
        shown, expected = [curve[0] for curve in curves[part]], [cell["on_data"][part] for cell in cells]
        np.testing.assert_allclose(shown, expected, rtol=1e-4, atol=1e-5, err_msg=part)
    by_position = [cell["on_data"]["position"] for cell in cells]
    assert max(by_position) > 0.9  # of learned positions: means over all positions give popularity instead
    micro = recorded(model, *split(batch, 8)).curves["position"]  # the same text, divided otherwise
    np.testing.assert_allclose([curve[0] for curve in micro], by_position, atol=0.15)


def test_shares_are_left_out_where_sequences_are_too_few_for_means_by_position():
    model, batch = windows(kq.models.DECODER)
    few = recorded(model, *split(batch, 8)[:3])
    assert "effective_rank" in few.curves
    assert not set(SHARES) & set(few.curves)


def test_ranks_are_those_of_the_form():
    torch.manual_seed(0)
    layers = {str(heads): kq.read(kq.Attention(16, heads))[0] for heads in (1, 4)}
    ranks = effective_ranks(layers)
    for name, layer in layers.items():
        exact = torch.linalg.svdvals(layer.form.dense().double())
        share = exact / exact.sum(-1, keepdim=True)
        expected = (-(share * share.clamp(min=1e-300).log()).sum(-1)).exp().flatten()
        torch.testing.assert_close(ranks[name], expected, rtol=1e-5, atol=1e-5)
