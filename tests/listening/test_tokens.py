"""The tokens of a call: positions that the model uses, and which tokens are padding."""

import pytest
import torch
from torch import nn
from transformers import StaticCache

import keyquery as kq
from keyquery.proof.families import tiny_model
from tests.instruments.plain import GPT
from tests.listening.models import randomised

MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]])
REAL = MASK.bool()
SLOTS = torch.arange(6).expand(4, 6)
COUNTED = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 0], [0, 0, 1, 2, 3, 0]])
FIRST = torch.tensor([[2], [0], [0], [1]])  # real token of a row


def ids(*shape):
    return torch.randint(3, 60, shape)


def calls_of(model, **inputs):
    with torch.no_grad(), kq.listen(model) as calls:
        model(**inputs)
    return calls


def assert_real(call, real=REAL):
    for mask in (call.real, call.real_queries):
        assert real.all() if mask is None else torch.equal(mask, real)


# Where a model embeds slots, that is where its tokens stand; where it sees offsets alone, the first real token is at 0,
# as in the others of test_listen.
POSITIONS = {
    "gpt2": SLOTS,
    "gpt_neo": SLOTS,
    "bert": SLOTS,
    "distilbert": SLOTS,
    "electra": SLOTS,
    "t5": COUNTED,
    "falcon": SLOTS - FIRST,
    "phi3": SLOTS - FIRST,
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_those_that_the_model_uses(name):
    inputs = {"decoder_input_ids": ids(4, 3)} if name == "t5" else {}
    model = tiny_model(name)
    for call in calls_of(model, input_ids=ids(4, 6), attention_mask=MASK, **inputs):
        if "decoder" in call.name.split(".") and name == "t5":
            continue
        assert torch.equal(call.positions.expand(4, 6)[REAL], POSITIONS[name][REAL])
        assert torch.equal(call.key_positions, call.positions)
        assert_real(call)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gptj", "gpt_neox", "bert"])
def test_given_positions_are_used(name):
    """Counted by the mask, as `generate` does; or anything else, which no padding changes."""
    model = tiny_model(name)
    for positions in (COUNTED, COUNTED + 7, 3 * SLOTS + 1):
        call = calls_of(model, input_ids=ids(4, 6), attention_mask=MASK, position_ids=positions)[0]
        assert torch.equal(call.positions.expand(4, 6)[REAL], positions[REAL])
        assert call.tokens.shift is None
    call = calls_of(model, input_ids=ids(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))[0]
    assert call.positions.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert call.real is call.real_queries is None


def test_the_shift_of_slots_is_known():
    """So that rotations, which are by slots, can be undone."""
    call = calls_of(tiny_model("llama"), input_ids=ids(4, 6), attention_mask=MASK)[0]
    assert torch.equal((call.positions + call.tokens.shift)[REAL], SLOTS[REAL])
    right = calls_of(tiny_model("llama"), input_ids=ids(1, 6), attention_mask=MASK[2:3])[0]
    assert right.tokens.shift is None


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_each_side_of_an_encoder_decoder_has_its_padding(name):
    model = tiny_model(name)
    target = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]])
    inputs = {"input_ids": ids(4, 6), "decoder_input_ids": ids(4, 6)}
    calls = calls_of(model, **inputs, attention_mask=MASK, decoder_attention_mask=target)
    assert len(calls) == 6
    for call in calls:
        decoder = "decoder" in call.name.split(".")
        queries, keys = target.bool() if decoder else REAL, target.bool() if decoder and not call.is_cross else REAL
        assert torch.equal(call.real, keys)
        assert torch.equal(call.real_queries, queries)
        assert call.is_causal == (decoder and not call.is_cross)
    crossed = [call for call in calls if call.is_cross]
    assert len(crossed) == 2
    assert all(torch.equal(call.key_positions[REAL], COUNTED[REAL]) for call in crossed)
    unpadded = [call for call in calls_of(model, **inputs, attention_mask=MASK) if "decoder" in call.name.split(".")]
    assert all(call.real_queries is None for call in unpadded)
    assert all(call.is_cross or call.real is None for call in unpadded)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_static_cache_has_free_slots(name, padded):
    model = tiny_model(name)
    model.set_attn_implementation("sdpa")
    tokens, mask, start = ids(2, 6), MASK[:2], 0
    cache = StaticCache(config=model.config, max_cache_len=9)
    slots = torch.arange(9).expand(2, 9) - (FIRST[:2] if padded and name == "llama" else 0)
    for step in (4, 1, 1):
        end = start + step
        given = {"attention_mask": mask[:, :end]} if padded else {}
        call = calls_of(model, input_ids=tokens[:, start:end], past_key_values=cache, **given)[0]
        assert call.key.shape[-2] == 9
        assert torch.equal(call.positions.expand(2, -1), slots[:, start:end])
        assert torch.equal(call.key_positions.expand(2, -1), slots)
        real = nn.functional.pad(mask[:, :end] if padded else torch.ones(2, end), (0, 9 - end)).bool()
        assert torch.equal(call.real, real)
        assert (call.weights()[..., end:] == 0).all()
        assert call.is_causal
        start = end


def test_positions_of_layers_of_ours():
    layer, x = kq.Attention(16, 2, rope=kq.Rope(8)), torch.randn(2, 5, 16)
    for positions in (torch.tensor([4, 0, 2, 3, 1]), torch.rand(2, 5) * 9):
        call = calls_of(layer, x=x, positions=positions)[0]
        assert torch.equal(call.positions, positions.reshape(-1, 5))
    real = torch.tensor([[True] * 5, [False, True, True, True, False]])
    call = calls_of(layer, x=x, mask=real)[0]
    assert torch.equal(call.real, real)
    assert call.positions[1, 1:4].tolist() == [0, 1, 2]


def test_a_model_of_ones_own_embeds_positions():
    class Shifted(GPT):
        def forward(self, idx):
            return self.h[0](self.wte(idx) + self.wpe(torch.arange(idx.shape[1]) + 3))

    assert calls_of(randomised(GPT()), idx=ids(2, 5))[0].positions.tolist() == [[0, 1, 2, 3, 4]]
    assert calls_of(randomised(Shifted()), idx=ids(2, 5))[0].positions.tolist() == [[3, 4, 5, 6, 7]]


def test_a_mask_may_be_given_to_an_inner_model_alone():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = tiny_model("llama")

        def forward(self, tokens, keep):
            return self.backbone(input_ids=tokens, attention_mask=keep).last_hidden_state

    call = calls_of(Wrapped(), tokens=ids(4, 6), keep=MASK)[0]
    assert call.name == "backbone.layers.0.self_attn"
    assert_real(call)
    assert torch.equal(call.positions[REAL], (SLOTS - FIRST)[REAL])
