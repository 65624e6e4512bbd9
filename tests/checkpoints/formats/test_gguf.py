"""GGUF files, written by the rules of their converters, against the models they were made of."""

import pytest
import torch

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("transformers", reason="the models need the extra hf")

import gguf

import keyquery as kq
from keyquery.listening.inputs.load import load_model
from keyquery.proof.families import tiny_model

SIZE = {"num_hidden_layers": 2, "rms_norm_eps": 1e-5}
MODELS = {
    "llama": ("llama", "LlamaModel", {}),
    "qwen2": ("qwen2", "Qwen2Model", {}),
    "qwen3": ("qwen3", "Qwen3Model", {"head_dim": 8}),
    "phi3": ("phi3", "Phi3Model", {"vocab_size": 32064}),  # it is padded with token 32000
    "gemma2": ("gemma2", "Gemma2Model", {"query_pre_attn_scalar": 16, "sliding_window": 4}),
    "gemma3": (
        "gemma3",
        "Gemma3TextModel",
        {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "sliding_window": 4},
    ),
}


def permuted(weight, heads):
    """How a converter stores q and k: pairs (i, i + r/2) become neighbours."""
    rank = len(weight) // heads
    return weight.reshape(heads, 2, rank // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def converted(model, name, value):
    """A tensor as the converter of its architecture stores it."""
    config = model.config
    if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        return permuted(value, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
    return value + 1 if config.model_type.startswith("gemma") and "norm" in name else value


def write(path, model, architecture, tensors=(), **facts):
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_pad_token_id(0)
    theta = config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]
    writer.add_rope_freq_base(theta)
    if getattr(config, "head_dim", None) and architecture != "llama":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    for key, value in facts.items():
        writer.add_float32(f"{architecture}.{key}", value)
    number = next(a for a, called in gguf.MODEL_ARCH_NAMES.items() if called == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, value in {f"model.{k}": v for k, v in model.state_dict().items()}.items():
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert called, name
        writer.add_tensor(called, converted(model, name, value).contiguous().numpy())
    for name, value in dict(tensors).items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same_scores(given, expected):
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        assert one.scale == pytest.approx(other.scale)
        assert one.window == other.window
        assert one.causal == other.causal
        for offset in (0, -1, -7):
            for view in ("form", "folded"):
                a, b = (getattr(layer, view).at(offset, layer.rope).dense() for layer in (one, other))
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", MODELS)
def test_a_converted_model_has_the_scores_of_the_original(architecture, tmp_path):
    name, cls, changes = MODELS[architecture]
    model = tiny_model(name, model=cls, **{**SIZE, **changes})
    path = write(tmp_path / "model.gguf", model, architecture)
    heads = kq.read(path)
    assert heads.family.name == "gguf"
    assert heads[0].notes == ()
    assert_same_scores(heads, kq.read(model))


@pytest.mark.parametrize("architecture", [name for name in MODELS if name != "phi3"])
def test_the_converter_is_the_one_that_transformers_undoes(architecture, tmp_path):
    """Another reader of the files above finds the original weights: they are what real converters write."""
    from transformers import AutoModel

    name, cls, changes = MODELS[architecture]
    model = tiny_model(name, model=cls, **{**SIZE, **changes})
    write(tmp_path / "model.gguf", model, architecture)
    loaded = AutoModel.from_pretrained(tmp_path, gguf_file="model.gguf").state_dict()
    for tensor, value in model.state_dict().items():
        if "norm" in tensor or "q_proj" in tensor or "k_proj" in tensor or "qkv" in tensor:
            torch.testing.assert_close(loaded[tensor], value, msg=tensor)


def test_what_transformers_would_draw_at_random_is_not_run(tmp_path):
    """It does not find the fused weights of Phi-3 in a GGUF file, and fills them with noise."""
    model = tiny_model("phi3", **SIZE, vocab_size=32064)
    path = write(tmp_path / "model.gguf", model, "phi3")
    with pytest.raises(
        ValueError, match=r"cannot be run: missing weights layers\.0\.mlp\.gate_up_proj\.weight, .* and 1 more"
    ):
        load_model(path)


def test_llama_3_frequency_factors_divide_the_frequencies(tmp_path):
    """They stand in a tensor, and no metadata tells of them; the converter computes them from the config."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = tiny_model("llama", **SIZE, rope_parameters=scaling)
    plain = 500000.0 ** -(torch.arange(0, 8, 2) / 8)
    factors = plain / model.rotary_emb.inv_freq  # the model's own
    assert factors.max() > 7
    path = write(tmp_path / "model.gguf", model, "llama", {"rope_freqs.weight": factors.float()})
    assert_same_scores(kq.read(path), kq.read(model))


def test_longrope_factors(tmp_path):
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3]}
    changes = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    model = tiny_model("phi3", **SIZE, **changes, rope_parameters={**parameters, "long_factor": [2.0] * 4})
    tensors = {"rope_factors_short.weight": torch.tensor([1.0, 1.1, 1.2, 1.3])}
    factor = model.rotary_emb.attention_scaling
    path = write(tmp_path / "model.gguf", model, "phi3", tensors, **{"rope.scaling.attn_factor": factor})
    assert_same_scores(kq.read(path), kq.read(model))


def test_the_largest_gemmas_scale_by_width(tmp_path):
    model = tiny_model("gemma2", num_hidden_layers=46, num_attention_heads=4, query_pre_attn_scalar=8)
    assert_same_scores(kq.read(write(tmp_path / "model.gguf", model, "gemma2")), kq.read(model))


def test_other_architectures_are_refused(tmp_path):
    model = tiny_model("llama", **SIZE)
    path = write(tmp_path / "model.gguf", model, "baichuan")
    with pytest.raises(ValueError, match=r"architecture is 'baichuan', which is not supported; supported: llama, "):
        kq.read(path)


def test_how_a_tensor_is_stored_is_told(tmp_path):
    from keyquery_studies.dial.study import precision

    weight = torch.randn(32, 32).numpy()
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_head_count(4)
    for role in ("q", "k"):
        packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"blk.0.attn_{role}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("token_embd.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = kq.read(tmp_path / "a.gguf").source
    assert (source.stored("layers.0.self_attn.q_proj.weight"), source.stored("embed_tokens.weight")) == ("Q4_1", "F32")
    assert precision(tmp_path / "a.gguf") == "Q4_1"


def test_a_truncated_file_is_named(tmp_path):
    path = write(tmp_path / "model.gguf", tiny_model("llama", **SIZE), "llama")
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
