"""What a swap refuses, and what fails on the way: the model is exactly as it was."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import keyquery as kq
from keyquery.intervene.swap import swap as surgery
from keyquery.proof.families import tiny_model
from tests.intervene.tiny import assert_refused, encoder, tiny
from tests.listening.models import assert_as_it_was, snapshot


def test_files_that_do_not_fit(tmp_path):
    model, file = tiny("bert"), tmp_path / "swap.safetensors"
    assert_refused(model, "there is no", FileNotFoundError, saved=file)
    with kq.swap(model, "psd") as swapped:
        swapped.save(file)
    assert_refused(tiny("bert", hidden_size=16), r"key\.\w+ is \(32.*\), expected \(16", saved=file)
    assert_refused(tiny("bert", num_hidden_layers=1), "no self-attention layer 1", saved=file)
    assert_refused(tiny("gpt2"), r"saved belongs to a model with layers encoder\.layer\.0", saved=file)
    assert_refused(model, "saved needs no data", saved=file, data=[])
    file.write_bytes(file.read_bytes()[:200])
    assert_refused(model, "not a readable safetensors file", saved=file)
    save_file({"a": torch.ones(1)}, file)
    assert_refused(model, "is not a saved swap: its metadata has no", saved=file)
    save_file({"a": torch.ones(1)}, file, {surgery.FORMAT: "{}"})
    assert_refused(model, r"its metadata cannot be read \(KeyError\('kernel'\)\)", saved=file)
    facts = '{"kernel": "psd", "symmetric_dims": 0.5, "layers": [0], "names": ["encoder.layer.0.attention.self"]}'
    save_file({"a": torch.ones(1)}, file, {surgery.FORMAT: facts})
    assert_refused(model, "does not fit the model: a is only in one of them", saved=file)


@pytest.mark.parametrize("step", ["start_nearest", "replace", "put"])
def test_a_swap_that_is_interrupted_leaves_the_model_as_it_was(step, monkeypatch):
    model, real, calls = tiny("bert"), getattr(surgery, step), []

    def fails(*args):
        calls.append(step)
        if len(calls) == 2:
            raise KeyboardInterrupt("in the second layer")
        return real(*args)

    monkeypatch.setattr(surgery, step, fails)
    assert_refused(model, "in the second layer", KeyboardInterrupt)
    assert len(calls) == 2


def test_modes_dtypes_and_dropout_stay():
    model = tiny("gpt2", attn_pdrop=0.2, resid_pdrop=0.3).to(torch.bfloat16)
    with kq.swap(model) as swapped:
        assert {weight.dtype for weight in swapped.parameters()} == {torch.bfloat16}
        module = model.h[1].attn
        assert (module.layer_idx, module.is_causal, module.config) == (1, True, model.config)
        assert (module.attention.dropout, module.after.p) == (0.2, 0.3)
        assert not any(part.training for part in model.modules())
        model.train()
        assert module.attention.training
    assert all(part.training for part in model.modules())  # as the user wanted it
    still = encoder(dropout=0.0).train()
    with kq.swap(still):
        assert all(part.training for part in still.modules())


@pytest.mark.unchecked
def test_refusals_of_models():
    assert_refused("bert", "model must be a live torch.nn.Module, got str", TypeError)
    assert_refused(nn.Linear(4, 4), "Linear has no known attention module")
    assert_refused(encoder().train(), "in training mode with dropout")
    with torch.device("meta"):
        meta = nn.MultiheadAttention(8, 2)
    with pytest.raises(ValueError, match="on the meta device"):
        kq.swap(meta)
    assert_refused(kq.Attention(8, 2), "is already a kq.Attention: build it with another kernel")
    assert_refused(nn.Sequential(nn.MultiheadAttention(8, 2, add_zero_attn=True)), "it has extra keys")
    assert_refused(nn.Sequential(nn.MultiheadAttention(8, 2, vdim=4)), "value or output projection is not 8 wide")
    flash = tiny("bert")
    flash.config._attn_implementation = "flash_attention_2"
    assert_refused(flash, "uses attention flash_attention_2")
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    assert_refused(nn.Sequential(layer, layer), "share one module")
    hooked = tiny("vit")
    hooked.layers[0].attention.forward = hooked.layers[0].attention.forward
    assert_refused(hooked, "its forward was already replaced")


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("qwen3", {}, "no QK-norm"),
        ("t5", {}, r"no position bias \(t5\)"),
        ("bloom", {}, r"no position bias \(alibi\)"),
        ("mistral", {"sliding_window": 4}, r"no sliding window \(4 tokens\)"),
        ("deberta_v2", {}, "no position bias|content-to-content"),
        ("deepseek", {}, "MLA"),
        ("albert", {}, "one block used by all"),
        ("gpt_neo", {}, r"window|GPTNeoSelfAttention \(gpt_neo\) is not supported"),
        ("gpt_oss", {}, "window|gpt_oss"),
        ("gemma2", {}, "window|gemma2"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "2048 positions"),
    ],
)
def test_refusals_of_what_a_kernel_cannot_keep(name, changes, why):
    assert_refused(tiny_model(name, **changes), why, kernel="general")


@pytest.mark.unchecked
def test_refusals_of_arguments():
    model = tiny("bert")
    assert_refused(model, "there is no kernel 'pds'; did you mean 'psd'", kernel="pds")
    assert_refused(model, "no self-attention layer 2; there are 0, 1", layers=[0, 2])
    assert_refused(model, "layers must be at least 0, got -1", layers=-1)
    assert_refused(model, "layers must be distinct", layers=[0, 0])
    assert_refused(model, "at least one, got", layers=[])
    assert_refused(model, "layers must be an integer", TypeError, layers=["0"])
    assert_refused(model, "symmetric_dims must be a share", kernel="split", symmetric_dims=2.0)
    assert_refused(tiny("gpt_neox"), "needs all 8 dimensions of a head rotated", kernel="split")


@pytest.mark.unchecked
def test_refusals_of_data():
    model = tiny("bert")
    ids = torch.randint(3, 60, (1, 9))
    assert_refused(model, "was never called: these inputs give no activations", data=[])
    assert_refused(model, "has 9 tokens", data=[{"input_ids": ids}])
    assert_refused(model, "data must be batches", TypeError, data={"input_ids": ids})
    assert_refused(model, "data must be batches", TypeError, data=[ids])
    assert_refused(model, "does not run on", data=[{"pixel_values": ids}])


def test_masks_that_add_other_values_are_told():
    model, x = encoder(), torch.randn(1, 5, 16)
    with kq.swap(model), pytest.raises(ValueError, match="must add 0 or −∞"):
        model(x, mask=torch.rand(5, 5))
    model = tiny("vit")
    with kq.swap(model), pytest.raises(ValueError, match="attention_mask must be"):
        model.layers[0].attention(torch.randn(1, 5, 32), torch.ones(1, 5, dtype=torch.bool))


def test_a_saved_swap_with_weights_that_are_no_numbers_is_refused(tmp_path):
    model, file = tiny("bert"), tmp_path / "swap.safetensors"
    with kq.swap(model, "psd") as swapped:
        next(swapped.parameters()).data.fill_(float("nan"))
        swapped.save(file)
    assert_refused(model, r"is not a saved swap: .* contains NaN or infinity", saved=file)


def test_a_swapped_model_is_not_saved_as_if_it_could_be_loaded(tmp_path):
    """Its attention would be drawn at random when it is loaded, without an error."""
    model = tiny("llama", model="LlamaForCausalLM")
    before = snapshot(model)
    first, second = kq.swap(model, "psd", layers=0), kq.swap(model, "psd", layers=1)
    for swapped in (first, second):
        for part in (model, model.model):
            with pytest.raises(RuntimeError, match=r"cannot be saved.*Swap\.save\(path\).*undo the swap"):
                part.save_pretrained(tmp_path)
        swapped.undo()
    assert not list(tmp_path.iterdir())
    assert_as_it_was(model, before)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
