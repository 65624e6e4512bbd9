"""Against TransformerLens on a GPT-2-shaped model: decomposed attention scores, entry by entry."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

import keyquery as kq

pytest.importorskip("transformer_lens")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model():
    """A GPT-2 with random weights, biases and gains."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=3, n_head=4)
    gpt2 = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in gpt2.named_parameters():
            parameter.copy_((1 if "ln_" in name and "weight" in name else 0) + 0.3 * torch.randn_like(parameter))
    return gpt2


@pytest.fixture(scope="module")
def lens(model):
    """The same model in TransformerLens, which wraps its modules in place: a copy."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers("gpt2", hf_model=deepcopy(model), tokenizer=_tokenizer())
    bridge.enable_compatibility_mode(no_processing=True)
    return bridge


def test_the_composition_of_two_heads_is_that_of_transformer_lens(model, lens):
    """K-composition ‖M·W_OV‖/(‖M‖‖W_OV‖) of heads 0.2 and 2.1, from our forms."""
    heads = kq.read(model.transformer)
    matrix, written = heads[2].form.dense()[1], next(iter(heads.output)).dense()[2]
    composed = float((matrix @ written).norm() / matrix.norm() / written.norm())
    theirs = lens.all_composition_scores("K").scores[0, 2, 2, 1]
    assert composed == pytest.approx(float(theirs), rel=1e-4)


def test_entries_are_the_decomposed_attention_scores_of_transformer_lens(model, lens):
    """Head results and embeddings of its cache, through its LayerNorm, W_Q and W_K."""
    ids = torch.randint(0, 60, (1, 9))
    layer, head, query, key = 2, 1, 8, 3
    reading = kq.attribute(model.transformer, inputs={"input_ids": ids}, head=(layer, head), query=query, key=key)
    _, cache = lens.run_with_cache(ids)
    heads, labels = cache.stack_head_results(layer, return_labels=True)
    writes = dict(zip(labels, heads[:, 0], strict=True))
    names = {f"L{at}H{h}": f"{at}.{h}" for at in range(layer) for h in range(4)}
    writes = {names[label]: write for label, write in writes.items()}
    writes["token embedding"], writes["position embedding"] = cache["embed"][0], cache["pos_embed"][0]
    writes |= {f"mlp {at}": cache["mlp_out", at][0] for at in range(layer)}
    block = model.transformer.h[layer]
    stream = cache["resid_pre", layer][0]
    size = (stream.var(-1, correction=0, keepdim=True) + block.ln_1.eps).sqrt()
    w_q, w_k = (getattr(lens.blocks[layer].attn, name)[head].detach() for name in ("W_Q", "W_K"))

    def normed(x):
        return (x - x.mean(-1, keepdim=True)) / size * block.ln_1.weight.detach()

    compared = 0
    for a, x in writes.items():
        for b, y in writes.items():
            expected = (normed(x)[query] @ w_q) @ (normed(y)[key] @ w_k) / 8**0.5
            entry = reading.table["raw"][reading.sources.index(a)][reading.sources.index(b)]
            assert entry == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
            compared += 1
    assert compared == 12**2
    own = cache["attn_scores", layer][0, head, query, key]
    assert reading.score == pytest.approx(float(own), rel=1e-4)


def _tokenizer():
    """TransformerLens requires one, and it is never asked for text."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a")
