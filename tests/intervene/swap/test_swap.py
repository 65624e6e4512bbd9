"""Attention in the place of a trained model's own: it computes the same, keeps its structure, and goes again."""

import copy
from contextlib import nullcontext

import pytest
import torch
from safetensors import safe_open
from torch import nn

import keyquery as kq
from keyquery.intervene.swap.build import FAMILIES
from keyquery.listening import attention_maps, joint_moments
from keyquery.proof.families import tiny_inputs
from tests.intervene.tiny import HEADS, TEXT, assert_close, assert_refused, encoder, padded, tiny
from tests.listening.models import assert_as_it_was, snapshot


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_a_copy_computes_the_same(name):
    model = tiny(name, "eager" if name in ("gpt2", "vit") else "sdpa")
    inputs = padded() if name in TEXT else tiny_inputs(name, model)
    real = inputs["attention_mask"].bool() if name in TEXT else None
    before, expected = snapshot(model), model(**inputs)[0]
    swapped = kq.swap(model, "general")
    assert_close(model(**inputs)[0], expected, real)
    assert all(float(share.max()) == 0 for share in swapped.lost.values())
    assert len(swapped.names) == len(kq.read(model)) == (4 if name == "clip" else 2)
    swapped.undo()
    assert_as_it_was(model, before)
    assert torch.equal(model(**inputs)[0], expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt_neox", "llama"])
def test_rotary_positions_are_those_that_are_given(name):
    model = tiny(name)
    for positions in (torch.tensor([[0, 1, 5, 6, 20]]), torch.tensor([[0, 1, 2, 3, 9], [4, 0, 1, 7, 8]])):
        inputs = {"input_ids": torch.randint(3, 60, (2, 5)), "position_ids": positions}
        expected = model(**inputs)[0]
        with kq.swap(model, "general"):
            assert_close(model(**inputs)[0], expected)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("name", HEADS)
def test_a_copy_generates_the_same(name, cache):
    model = tiny(name, model=HEADS[name])
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": cache is not None, "pad_token_id": 0}
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    inputs = padded(left=True)
    expected = model.generate(**inputs, **options)
    with kq.swap(model, "general"):
        assert torch.equal(model.generate(**inputs, **options), expected)
    with kq.swap(model, "psd"):  # every head has a key of its own there
        alone = model.generate(**inputs, **{**options, "use_cache": False})
        assert torch.equal(model.generate(**inputs, **options), alone)


@torch.no_grad()
@pytest.mark.parametrize("batch_first", [True, False])
def test_every_mask_of_multihead_attention(batch_first):
    model = nn.ModuleList([nn.MultiheadAttention(16, 4, batch_first=batch_first)]).eval()
    nn.init.normal_(model[0].in_proj_bias)
    x = torch.randn(2, 5, 16) if batch_first else torch.randn(5, 2, 16)
    alone = x[0] if batch_first else x[:, 0]
    before, cases = snapshot(model), masks().values()
    expected = [model[0](x, x, x, need_weights=False, **given)[0] for given in cases]
    unbatched = model[0](alone, alone, alone)[0]
    with kq.swap(model, "general") as swapped:
        assert swapped.names == ("0",)
        for given, out in zip(cases, expected, strict=True):
            attended, weights = model[0](x, x, x, **given)
            assert_close(attended, out)
            assert weights is None
        assert_close(model[0](alone, alone, alone)[0], unbatched)
    assert_as_it_was(model, before)
    assert_refused(model[0], "model is an attention module itself")


def masks():
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    each = (torch.rand(8, 5, 5) > 0.7) & ~torch.eye(5, dtype=torch.bool)
    return {
        "nothing": {},
        "causal": {"attn_mask": causal, "is_causal": True},
        "additive": {"attn_mask": torch.zeros(5, 5).masked_fill(causal, -torch.inf)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
        "each head": {"attn_mask": each, "key_padding_mask": padding},
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of the model before the swap
@pytest.mark.parametrize(
    ("layers", "batch_first", "grad"), [(None, True, False), ([0], False, False), ([1], True, True)]
)
def test_the_fused_paths_of_torch_do_not_pass_it_by(layers, batch_first, grad):
    """With padding and without gradients, torch packs tokens and calls a fused layer."""
    model, x = encoder(batch_first), torch.randn(2, 5, 16)
    x = x if batch_first else x.transpose(0, 1)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    real = ~padding if batch_first else ~padding.T
    with nullcontext() if grad else torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        before = snapshot(model)
        with kq.swap(model, "general", layers):
            assert_close(model(x, src_key_padding_mask=padding), expected, real)
            assert_close(model(x[:1] if batch_first else x[:, :1]), model(x)[:1] if batch_first else model(x)[:, :1])
        assert_as_it_was(model, before)
        with kq.swap(model, "skew", layers):
            assert (model(x, src_key_padding_mask=padding) - expected).abs()[real].max() > 1e-3


def test_decoders_of_torch_keep_their_cross_attention():
    model = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True).eval()
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    expected = model(x, memory)
    with kq.swap(model, "general") as swapped:
        assert swapped.names == ("self_attn",)
        assert_close(model(x, memory), expected)
        with pytest.raises(ValueError, match="must be the same tensor"):
            model.self_attn(x, memory, memory)
    assert_refused(model, r"no self-attention layer 0; there are 1", layers=[0])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_swaps_are_undone_in_either_order(order):
    model = encoder()
    before = snapshot(model)
    swaps = [kq.swap(model, "psd", 0), kq.swap(model, "skew", [1])]
    heads = kq.read(model)
    assert [layer.index for layer in heads] == [0, 1]
    assert float(heads[0].form.symmetry.min()) > 0.999 > -0.999 > float(heads[1].form.symmetry.max())
    for index in order:
        swaps[index].undo()
        with pytest.raises(RuntimeError, match=r"the swap to .* is already undone"):
            swaps[index].undo()
    assert_as_it_was(model, before)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_model_swapped_in_part_lists_all_its_layers(name):
    model = tiny(name)
    before = list(kq.read(model))
    kq.swap(model, "symmetric", [1])
    after = kq.read(model)
    assert [layer.index for layer in after] == [0, 1]
    assert torch.equal(after[0].form.query, before[0].form.query)
    assert float(after[1].form.symmetry.min()) > 0.999
    for old, new in zip(before, after, strict=True):
        assert (old.causal, old.scale, old.norm.kind, old.norm.eps) == (
            new.causal,
            new.scale,
            new.norm.kind,
            new.norm.eps,
        )
        assert torch.equal(old.norm.gain, new.norm.gain)
    assert len(kq.look(model).heads) == 8
    assert_refused(model, "layer 1 .* is already swapped")


@torch.no_grad()
@pytest.mark.parametrize("first", ["before", "between"])
def test_inner_outputs_are_recorded_again_after_the_undo(first):
    """transformers hangs its recorders once: a swapped model must not keep them from the modules that come back."""
    model, inputs = tiny("bert", "eager"), padded()
    expected = copy.deepcopy(model)(**inputs, output_attentions=True).attentions
    if first == "before":
        model(**inputs, output_attentions=True)
    before = snapshot(model)
    with kq.swap(model):
        assert len(model(**inputs, output_hidden_states=True).hidden_states) == 3
        assert [maps.shape for maps in attention_maps(model, inputs)] == [one.shape for one in expected]
    assert_as_it_was(model, before)
    given = model(**inputs, output_attentions=True).attentions
    assert len(given) == 2
    assert all(torch.equal(one, other) for one, other in zip(given, expected, strict=True))


def test_on_data_more_of_the_scores_is_kept():
    torch.manual_seed(0)
    model = tiny("bert")
    batches = [{"input_ids": torch.randint(3, 60, (8, 12))} for _ in range(4)]
    heads = kq.read(model)
    covariance = joint_moments(model, batches, heads)[1].covariance
    root = torch.linalg.cholesky(covariance)
    before = snapshot(model)

    def lost(module):
        """Of the layer's own z, made of [q; k] on data."""
        old = heads[1].weights
        joint = torch.cat((old.query, old.key), -2).flatten(0, 1).double()
        form = module.form()
        new = torch.cat((form.query, form.key), -2).detach().double()
        mix = new @ torch.linalg.pinv(joint) @ root
        whole = root[:, :8].mT @ root[:, 8:]
        return (whole - mix[:, :8].mT @ mix[:, 8:]).square().sum((-2, -1)) / whole.square().sum((-2, -1))

    with kq.swap(model, "psd") as by_weights:
        first = lost(model.encoder.layer[1].attention.self.attention)
    with kq.swap(model, "psd", data=iter(batches)) as on_data:
        second = lost(model.encoder.layer[1].attention.self.attention)
    assert (second < first).all()
    torch.testing.assert_close(second, on_data.lost[1], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(by_weights.lost[1], on_data.lost[1])
    assert_as_it_was(model, before)


@torch.no_grad()
@pytest.mark.parametrize(("name", "kernel"), [("bert", "split"), ("bert", "pairwise"), ("llama", "general")])
def test_a_saved_swap_is_loaded_onto_the_base_model(name, kernel, tmp_path):
    model, file = tiny(name), tmp_path / "swap.safetensors"
    base, inputs = copy.deepcopy(model), padded()
    swapped = kq.swap(model, kernel, [1], symmetric_dims=2)
    module = model.get_submodule(swapped.names[0])
    for weight in swapped.parameters():
        if weight is not module.attention.value.weight:
            weight.add_(0.01 * torch.randn_like(weight))
    swapped.save(file)
    again = kq.swap(base, saved=file)
    assert again.names == swapped.names
    assert torch.equal(base(**inputs)[0], model(**inputs)[0])
    with safe_open(file, "pt") as stored:
        assert f"{swapped.names[0]}.output.weight" in stored.keys()  # noqa: SIM118
        assert f"{swapped.names[0]}.value.weight" not in stored.keys()  # noqa: SIM118
    again.undo()
    again.save(tmp_path / "after_undo.safetensors")
    assert (tmp_path / "after_undo.safetensors").read_bytes() == file.read_bytes()
