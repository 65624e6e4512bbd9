"""Against TransformerLens on a GPT-2-shaped model: decomposed attention scores, entry by entry."""

from __future__ import annotations

import pytest
import torch

import keyquery as kq

pytest.importorskip("transformer_lens")
transformers = pytest.importorskip("transformers")


def test_entries_are_the_decomposed_attention_scores_of_transformer_lens():
    """Head results and embeddings of its cache, through its LayerNorm, W_Q and W_K."""
    from transformer_lens.model_bridge import TransformerBridge

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=3, n_head=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((1 if "ln_" in name and "weight" in name else 0) + 0.3 * torch.randn_like(parameter))
    ids = torch.randint(0, 60, (1, 9))
    layer, head, query, key = 2, 1, 8, 3
    reading = kq.attribute(model.transformer, inputs={"input_ids": ids}, head=(layer, head), query=query, key=key)
    lens = TransformerBridge.boot_transformers("gpt2", hf_model=model, tokenizer=_tokenizer())
    lens.enable_compatibility_mode(no_processing=True)
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
            # What is a bias for keyquery is in TransformerLens's head results for no head.
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
