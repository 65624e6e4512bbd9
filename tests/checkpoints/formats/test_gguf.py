"""GGUF files by the rules of their converters: what stands in tensors and metadata, and files that are broken."""

import pytest
import torch

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("transformers", reason="the models need the extra hf")

import gguf

import keyquery as kq
from keyquery.checkpoints.vocabulary import vocabulary
from keyquery.listening.inputs.load import load_model
from tests.checkpoints.formats.gguf_models import tensors_of, tiny, write

EPS = {"rms_norm_eps": 1e-5}


def written(path, model, architecture, more=None, theta=10000.0, **fields):
    """The model as a file; queries and keys of Llama are permuted, and gains of Gemma are stored with 1 added."""
    rules = {"permute": architecture == "llama", "one": architecture.startswith("gemma")}
    tensors = {**tensors_of(model, architecture, **rules), **(more or {})}
    fields = {"add_head_count_kv": 2, "add_layer_norm_rms_eps": 1e-5, **fields}
    if architecture == "llama":
        fields |= {"add_rope_dimension_count": 8, "add_vocab_size": 60, "add_feed_forward_length": 48}
    return write(path, architecture, tensors, model.config, theta, **fields)


def assert_same_scores(given, expected):
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        assert (one.scale, one.window, one.causal) == (pytest.approx(other.scale), other.window, other.causal)
        for offset in (0, -7):
            for view in ("form", "folded"):
                a, b = (getattr(layer, view).at(offset, layer.rope).dense() for layer in (one, other))
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_converter_is_the_one_that_transformers_undoes(tmp_path):
    """Another reader of the files finds the original weights: they are what real converters write."""
    from transformers import AutoModel

    model = tiny("LlamaModel", **EPS)
    path = written(tmp_path / "model.gguf", model, "llama")
    loaded = AutoModel.from_pretrained(tmp_path, gguf_file="model.gguf").state_dict()
    for name, value in model.state_dict().items():
        if "norm" in name or "q_proj" in name or "k_proj" in name:
            torch.testing.assert_close(loaded[name], value, msg=name)
    heads = kq.read(path)
    assert (heads.family.name, heads[0].notes) == ("gguf", ())
    assert_same_scores(heads, kq.read(model))


def test_what_transformers_would_draw_at_random_is_not_run(tmp_path):
    """It does not find the fused weights of Phi-3 in a GGUF file, and fills them with noise."""
    model = tiny("Phi3Model", vocab_size=32064, num_hidden_layers=2)
    fields = {"add_feed_forward_length": 48, "add_vocab_size": 32064}
    path = written(tmp_path / "model.gguf", model, "phi3", **fields)
    with pytest.raises(ValueError, match=r"cannot be run: missing weights .*gate_up_proj\.weight"):
        load_model(path)


def test_llama_3_frequency_factors_divide_the_frequencies(tmp_path):
    """They stand in a tensor, and no metadata tells of them; the converter computes them from the config."""
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = tiny("LlamaModel", **EPS, rope_parameters=scaling)
    factors = 500000.0 ** -(torch.arange(0, 8, 2) / 8) / model.rotary_emb.inv_freq  # the model's own
    assert factors.max() > 7
    more = {"rope_freqs.weight": factors.float()}
    assert_same_scores(kq.read(written(tmp_path / "a.gguf", model, "llama", more, 500000.0)), kq.read(model))


def test_longrope_factors(tmp_path):
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3]}
    changes = {"rope_parameters": {**parameters, "long_factor": [2.0] * 4}, "original_max_position_embeddings": 32}
    model = tiny("Phi3Model", **EPS, **changes)
    more = {"rope_factors_short.weight": torch.tensor([1.0, 1.1, 1.2, 1.3])}
    fields = {"add_rope_scaling_attn_factors": model.rotary_emb.attention_scaling}
    assert_same_scores(kq.read(written(tmp_path / "a.gguf", model, "phi3", more, **fields)), kq.read(model))


def test_the_largest_gemmas_scale_by_width(tmp_path):
    model = tiny("Gemma2Model", **EPS, num_hidden_layers=46, head_dim=8, query_pre_attn_scalar=8, sliding_window=4)
    fields = {"add_key_length": 8, "add_sliding_window": 4}
    assert_same_scores(kq.read(written(tmp_path / "a.gguf", model, "gemma2", **fields)), kq.read(model))


def test_how_a_tensor_is_stored_and_what_the_tokens_are(tmp_path):
    from keyquery_studies.common.subjects import precision

    weights = {f"blk.0.attn_{role}.weight": torch.randn(32, 32) for role in "qk"}
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_head_count(4)
    writer.add_token_list(["one", "Ġtwo"])
    for name, weight in weights.items():
        packed = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("token_embd.weight", torch.randn(50, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    heads = kq.read(tmp_path / "a.gguf")
    source = heads.source
    assert precision(tmp_path / "a.gguf") == "Q4_1"
    assert (source.stored("layers.0.self_attn.q_proj.weight"), source.stored("embed_tokens.weight")) == ("Q4_1", "F32")
    assert vocabulary(tmp_path / "a.gguf") == ["one", "▁two"]
    assert heads.embedding().shape == (50, 32)


def test_a_truncated_file_is_named(tmp_path):
    path = written(tmp_path / "model.gguf", tiny("LlamaModel"), "llama")
    data = path.read_bytes()
    for size, words in (
        (0, r"is not a readable GGUF file"),
        (3, r"ends at byte 3"),
        (100, r"ends at byte 100"),
        (len(data) - 100, r"\.weight should end at byte \d+, and the file ends at \d+: it is truncated"),
    ):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=words) as error:
            kq.read(path)
        assert "\n" not in str(error.value)
