"""What cannot be estimated is refused in one sentence, and a model is left bit for bit as it was."""

from itertools import count

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.instruments.ablation.losses import next_token_loss
from keyquery.layers import LanguageModel
from tests.instruments.ablation.oracles import decoder, text
from tests.listening.models import assert_as_it_was, snapshot


@pytest.fixture
def model():
    return decoder("llama")


def flags(model):
    return [(weight.requires_grad, id(weight.grad)) for weight in model.parameters()]


def assert_as_before(model, before):
    assert_as_it_was(model, before[0])
    assert flags(model) == before[1]


def prepared(model):
    """A model with some frozen weights, and gradients of a training step."""
    for number, weight in enumerate(model.parameters()):
        weight.requires_grad_(number % 3 != 0)
        weight.grad = torch.ones_like(weight) if number % 2 else None
    model.train()
    return snapshot(model), flags(model)


@pytest.mark.parametrize("measure", ["none", "all", "auto"])
def test_a_model_is_left_as_it_was(model, measure):
    before = prepared(model)
    kq.ablate(model, [text(rows=3)], changes=["skew", "keys 4", "zero"], means="global", measure=measure)
    assert_as_before(model, before)


class Interrupting(nn.Module):
    """A head for tokens that raises at one of its calls, forward or backward."""

    def __init__(self, inner, error, call, backward=False):
        super().__init__()
        self.inner, self.error, self.calls, self.backward = inner, error, count(call - 1, -1), backward

    def forward(self, x):
        out = self.inner(x)
        if next(self.calls) == 0 and not self.backward:
            raise self.error
        if self.backward and out.requires_grad:

            def fail(grad):
                raise self.error

            out.register_hook(fail)
        return out


@pytest.mark.parametrize(("call", "backward"), [(1, False), (2, False), (3, False), (5, False), (9, False), (0, True)])
def test_a_model_is_left_as_it_was_after_an_interrupt(model, call, backward):
    """While means are measured, the loss is estimated, and changes are measured."""
    model.lm_head = Interrupting(model.lm_head, KeyboardInterrupt(), call, backward)
    before = prepared(model)
    with pytest.raises(KeyboardInterrupt):
        kq.ablate(model, [text(rows=4)], changes=["skew", "zero"], means="global", measure="all")
    assert_as_before(model, before)
    model.lm_head = model.lm_head.inner
    assert kq.ablate(model, [text(rows=4)], changes="zero", measure="none").rows


def test_a_model_without_gradients_can_be_measured(model):
    """Its backward fails, as that of quantised weights may."""
    error = NotImplementedError("derivative for aten::matmul_of_4_bits is not implemented")
    model.lm_head = Interrupting(model.lm_head, error, 0, backward=True)
    before = prepared(model)
    with pytest.raises(ValueError, match="an estimate needs gradients, which this model does not have: derivative"):
        kq.ablate(model, [text(rows=3)], changes="zero")
    assert_as_before(model, before)
    reading = kq.ablate(model, [text(rows=3)], changes="zero", measure="all")
    assert reading.check is None
    assert all(row["evidence"] == "measured" and "estimate" not in row for row in reading.rows)
    model.lm_head = model.lm_head.inner
    model.lm_head.register_forward_hook(lambda module, args, out: out.detach())
    with pytest.raises(ValueError, match="the loss has no gradient with respect to the attention"):
        kq.ablate(model, [text(rows=3)], changes="zero")


def test_inference_mode(model):
    """Of the caller it changes nothing; weights that were made in it have no gradients."""
    expected = kq.ablate(model, [text(rows=3)], changes="zero", measure="none").rows
    with torch.inference_mode():
        assert kq.ablate(model, [text(rows=3)], changes="zero", measure="none").rows == expected
        made = decoder("llama")
    with pytest.raises(ValueError, match="the weights were made in inference mode"):
        kq.ablate(made, [text(rows=3)], changes="zero")
    assert kq.ablate(made, [text(rows=3)], changes="zero", measure="all").rows


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("measure", ["none", "all"])
def test_a_loss_that_is_not_finite_is_refused(model, value, measure):
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = value
    batch = text(rows=3)
    batch["input_ids"][1, 2] = 7
    batch["input_ids"][[0, 2]] = batch["input_ids"][[0, 2]].clamp(min=8)
    with pytest.raises(ValueError, match=r"the loss is not finite: it is nan for 1 of 3 sequences"):
        kq.ablate(model, [batch], changes="zero", measure=measure)
    with pytest.raises(ValueError, match="the loss is not finite: it is inf for 3 of 3 sequences"):
        kq.ablate(model, [text(rows=3)], lambda model, batch: torch.full((3,), torch.inf), changes="zero")


def test_a_loss_of_some_sequences_can_be_measured(model):
    """Gradients of a mean over fewer sequences cannot be assigned to sequences."""

    def first_two(model, batch):
        return next_token_loss(model, batch)[:2]

    with pytest.raises(ValueError, match=r"one value per sequence, \(batch,\), got \(\)"):
        kq.ablate(model, [text(rows=3)], lambda model, batch: first_two(model, batch).mean(), changes="zero")
    with pytest.raises(ValueError, match="at least one batch, got none"):
        kq.ablate(model, [])
    with pytest.raises(ValueError, match="an estimate needs a loss of every sequence, got 2 of 3: measure all"):
        kq.ablate(model, [text(rows=3)], first_two, changes="zero")
    assert kq.ablate(model, [text(rows=3)], first_two, changes="zero", measure="all").sequences == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"changes": "skw"}, "there is no change 'skw': try symmetric, only position, zero"),
        ({"changes": "values 4 mean apart"}, "there is no change 'values 4 mean apart'"),
        ({"changes": "only everything"}, "there is no change 'only everything'"),
        ({"changes": "window 2 + last"}, "there is no change"),
        ({"changes": "form general"}, "there is no change"),
        ({"changes": []}, "changes must name at least one, got none"),
        ({"changes": [3]}, "a change must be a name or a function, got a int"),
        ({"measure": "some"}, "measure must be one of 'auto', 'all', 'none', got 'some'"),
        ({"by": "neuron"}, "by must be"),
        ({"by": {"a": ["0.9"]}}, "layer 0 has no head 9"),
        ({"heads": "7.0"}, "there is no self-attention layer 7"),
        ({"means": "median"}, "means must be"),
        ({"means": "position", "changes": "skew"}, "'skew' is about means by position, which need 32 sequences, got 3"),
        ({"means": "position", "changes": "zero,keys 4 mean apart"}, "'keys 4 mean apart' is about means by position"),
        ({"means": "position", "changes": "skew direction 0 on data"}, "is about means by position"),
        ({"changes": "skew direction 99"}, "directions: there is no 99"),
        ({"changes": "form rank 99"}, "rank must be"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(model, options, words):
    calls = []
    handle = model.register_forward_pre_hook(lambda module, args: calls.append(1))
    with pytest.raises((ValueError, TypeError), match=words) as error:
        kq.ablate(model, [text(rows=3)], **options)
    assert "\n" not in str(error.value)
    handle.remove()
    assert not calls


def test_a_text_shorter_than_a_window(tmp_path):
    model, tokenizer = LanguageModel.load(kq.models.DECODER), Tokenizer.load(kq.models.DECODER)
    path = tmp_path / "short.txt"
    path.write_text("a few words")
    with pytest.raises(ValueError, match="over sequences and needs at least 2, got 1"):
        kq.ablate(model, text=path, tokenizer=tokenizer)
    path.write_text("x")
    with pytest.raises(ValueError, match="the text is too short: no line has two tokens"):
        kq.ablate(model, text=path, tokenizer=tokenizer)
    path.write_text("a few words\nand a few more words")
    reading = kq.ablate(model, text=path, tokenizer=tokenizer, heads="0.0", changes="zero", measure="none")
    assert reading.sequences == 2
