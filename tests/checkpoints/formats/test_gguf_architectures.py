"""Every GGUF architecture: a tiny file by the rules of its converter has the scores of the model it was made of."""

import pytest
import torch

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("transformers", reason="the models need the extra hf")

import gguf

import keyquery as kq
from keyquery.checkpoints.formats.gguf_config import architectures
from tests.checkpoints.formats.gguf_models import own_maps, own_scores, read_scores, tensors_of, tiny, write

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {
    **MOE,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
KV, MHA = {"add_head_count_kv": 2}, {"add_head_count_kv": 4}
RMS, LAYER = {"add_layer_norm_rms_eps": 1e-5}, {"add_layer_norm_eps": 1e-5}
RMS8, RMS16 = {**RMS, "add_key_length": 8}, {**RMS, "add_key_length": 16}
TURNED8, TURNED4 = {**RMS, "add_rope_dimension_count": 8}, {**LAYER, "add_rope_dimension_count": 4}
HEAD8, HEAD16, HALF = {"head_dim": 8}, {"head_dim": 16}, {"partial_rotary_factor": 0.5}
GLM = ({**HEAD8, "attention_bias": True}, {**RMS, "add_rope_dimension_count": 4})
MROPE = {"mrope_section": [2, 1, 1]}


def rope(theta=10000.0, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def case(cls, model=None, fields=RMS, theta=777.0, more=None, **rules):
    """Class, its config, GGUF's fields, rotary base, and the converter's rules."""
    parameters = {} if theta is None else rope(theta, **(more or {}))
    return cls, {"rms_norm_eps": 1e-5, **parameters, **(model or {})}, {**KV, **fields}, theta, rules


EPS = {"layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5, "norm_eps": 1e-5}
GPT2 = {**EPS, "n_embd": 32, "n_layer": 4, "n_head": 4}
SLIDING, WINDOW = {"sliding_window": 4}, {"add_sliding_window": 4}
MLA = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
MLA |= {**ROUTED, "num_key_value_heads": 4}
MLA_FIELDS = {"add_q_lora_rank": 12, "add_kv_lora_rank": 8, "add_key_length": 12, "add_key_length_mla": 10, **RMS}
MLA_FIELDS |= {"add_value_length_mla": 5, "add_rope_dimension_count": 4, "add_head_count_kv": 1}
PLAIN = {"rope_type": "default", "rope_theta": 777.0}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
YARN_FIELDS = {"add_rope_scaling_type": gguf.RopeScalingType.YARN, "add_rope_scaling_factor": 32.0}
YARN_FIELDS |= {"add_rope_scaling_orig_ctx_len": 64}
LINEAR_FIELDS = {"add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 8.0}
GEMMA3 = {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}
GEMMA3["rope_parameters"] = {"full_attention": {"rope_type": "linear", "rope_theta": 777.0, "factor": 8.0}}
GEMMA3["rope_parameters"]["sliding_attention"] = {"rope_type": "default", "rope_theta": 10000.0}
OLMO3 = {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": {**PLAIN, **YARN}}}
EXAONE = {**WINDOW, "add_sliding_window_pattern": [True, True, True, False]}
MODERN = {"layer_types": (["full_attention"] + ["sliding_attention"] * 2) * 2 + ["full_attention"]}
MODERN |= {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_theta": 99.0}}}
MODERN |= {**EPS, "num_hidden_layers": 7, "local_attention": 8}
MODERN_FIELDS = {**LAYER, **MHA, "add_sliding_window": 8, "add_rope_freq_base_swa": 99.0}
MISTRAL3 = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
MINIMAX = {**RMS16, "add_rope_dimension_count": 8}
BOTH = {**LAYER, **MHA, "add_causal_attention": False}
ENCODERS = ("eurobert", "gemma-embedding", "bert", "nomic-bert", "modern-bert")
POST = ("bert", "nomic-bert")
CASES = {
    "llama": case("LlamaModel", fields=TURNED8, permute=True),
    "llama, as Mistral": case("MistralModel", fields=TURNED8, permute=True),
    "llama, as Mixtral": case("MixtralModel", MOE, TURNED8, permute=True),
    "mistral3": case("Ministral3Model", HEAD8, {**RMS8, **TURNED8}, more=MISTRAL3, permute=True),
    "arcee": case("ArceeModel", fields=TURNED8, permute=True),
    "granite": case("GraniteModel", {"attention_multiplier": 0.3}, {**RMS, "add_attention_scale": 0.3}, permute=True),
    "granitemoe": case(
        "GraniteMoeModel", {**MOE, "attention_multiplier": 0.3}, {**RMS, "add_attention_scale": 0.3}, permute=True
    ),
    "smollm3": case("SmolLM3Model", fields=TURNED8, permute=True),
    "ernie4_5": case("Ernie4_5Model", HEAD8, RMS8),
    "ernie4_5-moe": case("Ernie4_5_MoeModel", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "chatglm": case("GlmModel", *GLM, more=HALF),
    "glm4": case("Glm4Model", *GLM, more=HALF),
    "command-r": case("CohereModel", EPS, LAYER),
    "cohere2": case("Cohere2Model", {**EPS, **SLIDING, **HEAD8}, {**LAYER, **WINDOW, "add_rope_dimension_count": 8}),
    "deepseek2": case("DeepseekV3Model", MLA, MLA_FIELDS),
    "deepseek2, as V2": case("DeepseekV2Model", MLA, MLA_FIELDS),
    "qwen2": case("Qwen2Model"),
    "qwen2moe": case("Qwen2MoeModel", {**MOE, "shared_expert_intermediate_size": 16}),
    "qwen2vl": case("Qwen2VLTextModel", more=MROPE),
    "qwen3": case("Qwen3Model", HEAD8, RMS8),
    "qwen3moe": case("Qwen3MoeModel", {**MOE, **HEAD8}, RMS8),
    "qwen3vl": case("Qwen3VLTextModel", HEAD8, RMS8, more=MROPE),
    "qwen3vlmoe": case("Qwen3VLMoeTextModel", {**MOE, **HEAD8}, RMS8, more=MROPE),
    "gemma": case("GemmaModel", HEAD16, RMS16, one=True),
    "gemma2": case("Gemma2Model", {**HEAD16, "query_pre_attn_scalar": 16, **SLIDING}, {**RMS16, **WINDOW}, one=True),
    "phi2": case("PhiModel", EPS, TURNED4, more=HALF),
    "phi3": case("Phi3Model", SLIDING, {**RMS, **WINDOW}),
    "phimoe": case("PhimoeModel", {**MOE, "attention_bias": True}, LAYER),
    "starcoder": case("GPTBigCodeModel", GPT2, {**LAYER, "add_head_count_kv": 1}, None),
    "starcoder2": case("Starcoder2Model", {**EPS, "use_bias": True}, LAYER),
    "stablelm": case("StableLmModel", EPS, TURNED4, more=HALF),
    "nemotron": case("NemotronModel", EPS, TURNED4, more=HALF, one=True),
    "gptneox": case("GPTNeoXModel", EPS, {**TURNED4, **MHA}, more=HALF, regroup=True, groups=4),
    "gpt2": case("GPT2Model", GPT2, {**LAYER, **MHA}, None, transpose=True),
    "eurobert": case("EuroBertModel", fields={**RMS, "add_causal_attention": False}),
    "olmo2": case("Olmo2Model"),
    "olmo2, as OLMo 3": case("Olmo3Model", {**SLIDING, **OLMO3}, {**RMS, **YARN_FIELDS, **WINDOW}),
    "olmoe": case("OlmoeModel", MOE),
    "seed_oss": case("SeedOssModel", {**HEAD16, "attention_bias": True}, RMS16),
    "apertus": case("ApertusModel"),
    "dots1": case("Dots1Model", {**ROUTED, **HEAD8}, RMS8),
    "minimax-m2": case("MiniMaxM2Model", {**MOE, **HEAD16, "rotary_dim": 8}, MINIMAX, more=HALF),
    "glm4moe": case(
        "Glm4MoeModel", {**ROUTED, **GLM[0], "use_qk_norm": True}, {**GLM[1], "add_key_length": 8}, more=HALF
    ),
    "exaone4": case("Exaone4Model", {**SLIDING, "sliding_window_pattern": 4, **HEAD8}, {**RMS, **EXAONE}),
    "gpt-oss": case(
        "GptOssModel",
        {**MOE, **SLIDING, **HEAD16},
        {**RMS16, **YARN_FIELDS, **WINDOW},
        more={**YARN, "truncate": False},
    ),
    "gemma3": case("Gemma3TextModel", {**GEMMA3, **SLIDING}, {**RMS16, **LINEAR_FIELDS, **WINDOW}, one=True),
    "gemma-embedding": case(
        "Gemma3TextModel",
        {**GEMMA3, "sliding_window": 8, "use_bidirectional_attention": True},
        {**RMS16, **LINEAR_FIELDS, "add_sliding_window": 8},
        one=True,
    ),
    "bert": case("BertModel", EPS, BOTH, None),
    "nomic-bert": case("NomicBertModel", EPS, BOTH, fuse=True),
    "modern-bert": case("ModernBertModel", MODERN, MODERN_FIELDS),
}
FALCON = {**EPS, "new_decoder_architecture": True, "num_kv_heads": 2}
FALCON_7B = {**EPS, "new_decoder_architecture": False, "multi_query": True}
MAPS = {
    "bloom": case("BloomModel", {**EPS, "n_layer": 3, "n_head": 4}, {**LAYER, **MHA}, None, regroup=True, groups=4),
    "falcon": case("FalconModel", FALCON, {**LAYER, **KV}, regroup=True, groups=2),
    "falcon, as 7B": case("FalconModel", FALCON_7B, {**LAYER, "add_head_count_kv": 1}, regroup=True, groups=1),
}


def made(name, folder, **options):
    cls, changes, fields, theta, rules = (CASES | MAPS)[name]
    model = tiny(cls, **changes)
    tensors = tensors_of(model, name.partition(",")[0], **rules)
    path = write(folder / "a.gguf", name.partition(",")[0], tensors, model.config, theta, **{**fields, **options})
    return model, path


def assert_close(given, expected):
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_the_scores_are_those_of_the_model(name, tmp_path):
    model, path = made(name, tmp_path)
    layers = list(kq.read(path))
    expected = own_scores(model)
    kernels, kinds = len(layers) // len(expected), getattr(model.config, "layer_types", None)
    assert len(expected) == model.config.num_hidden_layers
    assert len(layers) == kernels * len(expected)
    for index, (scores, entered, before) in enumerate(expected):
        own = layers[index * kernels : (index + 1) * kernels]
        assert_close(read_scores(own, entered), scores)
        assert own[0].causal == (name not in ENCODERS)
        if own[0].norm is not None and name not in POST and (name, index) != ("modern-bert", 0):
            assert_close(own[0].norm(before), entered)
        if kinds and "add_sliding_window" in CASES[name][2]:
            size = 5 if name == "modern-bert" else model.config.sliding_window
            assert own[0].window == (size if kinds[index] == "sliding_attention" else None)


@pytest.mark.parametrize("name", MAPS)
def test_the_attention_maps_are_those_of_the_model(name, tmp_path):
    """Of models that do not use the attention interface of transformers."""
    model, path = made(name, tmp_path)
    heads = kq.read(path)
    for layer, (expected, entered) in zip(heads, own_maps(model, ".self_attention"), strict=True):
        count = len(entered)
        offsets = torch.arange(count) - torch.arange(count)[:, None]
        scores, bias = read_scores([layer], entered), heads.position_bias(layer, offsets.flatten())
        scores = scores if bias is None else scores + bias.reshape(-1, count, count).float()
        assert (bias is not None) == (name == "bloom")
        assert_close(scores.masked_fill(offsets > 0, -torch.inf).softmax(-1), expected)


@pytest.mark.parametrize("name", ["bert", "nomic-bert"])
def test_the_norm_that_feeds_a_layer_is_the_last_of_the_one_before(name, tmp_path):
    model, path = made(name, tmp_path)
    tensors = model.state_dict()
    last = "encoder.layer.{}.output.LayerNorm" if name == "bert" else "layers.{}.post_mlp_layernorm"
    for index, layer in enumerate(kq.read(path)):
        norm = last.format(index - 1) if index else "embeddings.LayerNorm"
        assert torch.equal(layer.norm.gain, tensors[f"{norm}.weight"])
        assert torch.equal(layer.norm.shift, tensors[f"{norm}.bias"])


def test_every_architecture_is_proven():
    proven = {name.partition(",")[0] for name in CASES | MAPS}
    assert proven == set(architectures())
    assert len(proven) >= 30
    assert proven <= set(gguf.MODEL_ARCH_NAMES.values())


@pytest.mark.parametrize("name", ["llama", "qwen2", "deepseek2"])
def test_the_other_pairs_would_be_wrong(name, tmp_path):
    """The comparison sees whether rotary pairs are neighbours or halves."""
    model, path = made(name, tmp_path)
    heads = kq.read(path)
    heads.config["rope_interleave"] = not heads.config["rope_interleave"]
    layers, expected = list(heads), own_scores(model)
    kernels = len(layers) // len(expected)
    errors = [
        float((read_scores(layers[index * kernels : (index + 1) * kernels], entered) - scores).abs().max())
        for index, (scores, entered, _) in enumerate(expected)
    ]
    assert max(errors) > 0.01


KINDS = sorted((kind for kind in gguf.quants._type_traits if kind in gguf.GGML_QUANT_SIZES), key=int)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_that_gguf_dequantises_is_read(kind, tmp_path):
    """Random blocks, against the package itself."""
    import numpy as np

    values, size = gguf.GGML_QUANT_SIZES[kind]
    width = 256
    generator = np.random.default_rng(0)
    packed = {}
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen2")
    writer.add_block_count(1)
    writer.add_head_count(4)
    for role in ("q", "k"):
        data = generator.integers(
            0, 60, (64, width // values * size), dtype=np.uint8
        )  # small, so that scales are finite
        packed[role] = gguf.quants.dequantize(data, kind)
        writer.add_tensor(f"blk.0.attn_{role}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (layer,) = kq.read(tmp_path / "a.gguf")
    for given, role in ((layer.weights.query, "q"), (layer.weights.key, "k")):
        assert np.array_equal(given.reshape(64, width).numpy(), packed[role])
    assert layer.notes[-1:] == ((f"weights: {kind.name}",) if kind.name != "BF16" else layer.notes[-1:])


def test_what_is_not_read_is_refused(tmp_path):
    model = tiny("CohereModel", **EPS, **rope(), use_qk_norm=True)
    tensors = tensors_of(model, "command-r")
    path = write(tmp_path / "a.gguf", "command-r", tensors, model.config, 777.0, **KV, **LAYER)
    with pytest.raises(ValueError, match=r"q_norm\.weight has the shape \(4, 8\): a QK-norm with gains per head"):
        kq.read(path)
    path = write(tmp_path / "b.gguf", "grok", tensors, model.config, 777.0, **KV, **RMS)
    with pytest.raises(ValueError, match="its architecture is 'grok', which is not supported; supported: llama, "):
        kq.read(path)
    tensors = tensors_of(tiny("Qwen2Model"), "qwen2")
    path = write(tmp_path / "c.gguf", "qwen2", tensors, model.config, 777.0, **RMS, add_head_count_kv=[2, 0, 2, 0])
    with pytest.raises(ValueError, match=r"head_count_kv differs from layer to layer"):
        kq.read(path)
