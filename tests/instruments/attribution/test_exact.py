"""The table sums to the score of the model, in every architecture."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.layers import LanguageModel
from keyquery.listening import attention_maps, text_batches
from keyquery.listening.inputs.batches import read_lines
from keyquery.listening.inputs.load import load_tokenizer
from keyquery.listening.residual.tracing import module_of
from tests.instruments.attribution.models import ARCHITECTURES, IDS, build, inputs, softmax_inputs

pytest.importorskip("transformers")
LAST = IDS.shape[1] - 1


SLOW = ("cohere", "falcon", "opt", "qwen3")  # QK-norm is also in olmo2
EACH = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ARCHITECTURES]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.few(3)
def test_the_entries_sum_to_the_score_of_the_model(name):
    model = build(name)
    own = softmax_inputs(model)
    heads = kq.read(model)
    layer = [layer for layer in heads if layer.kind == "self"][-1]
    scores = own[module_of(layer)]
    if name == "bloom":  # its ALiBi is slope·key, that of the paper slope·(key − query): the same to softmax
        scores = scores - (2.0 ** -torch.arange(2, 10, 2))[:, None, None] * torch.arange(LAST + 1)[:, None]
    for head, query, key in ((0, LAST, 1), (3, 2, 0)):
        label = (layer.index, head)
        reading = kq.attribute(model, inputs=inputs(model), head=label, query=query, key=key)
        cap = layer.softcap
        capped = reading.score if cap is None else cap * np.tanh(reading.score / cap)
        assert capped == pytest.approx(float(scores[head, query, key]), rel=1e-4)
        # Relative entries: against the mean over the keys that the model's own mask leaves.
        seen = scores[head, query] > -1e30
        raw = scores[head, query][seen] if cap is None else cap * torch.atanh(scores[head, query][seen] / cap)
        expected = float(raw[key] - raw.mean())
        assert np.sum(reading.table["relative"]) == pytest.approx(expected, rel=1e-4, abs=1e-4 * abs(reading.score))
        assert reading.weight == pytest.approx(float(scores[head, query].softmax(-1)[key]), abs=1e-5)


def test_every_kind_of_source_has_a_name():
    model = build("t5")
    reading = kq.attribute(model, inputs=inputs(model), head="decoder 1.2", query=3, key=1)
    assert list(reading.sources) == [
        "token embedding",
        *(f"decoder 0.{head}" for head in range(4)),
        *(f"cross 0.{head}" for head in range(4)),
        "mlp decoder 0",
        "bias",
        "position bias",
    ]
    bert = kq.attribute(build("bert"), inputs={"input_ids": IDS}, head="1.2", query=3, key=5)
    assert {"token embedding", "position embedding", "token type embedding", "0.0", "mlp 0", "bias"} <= {*bert.sources}


def test_a_bundled_model_is_attributed_from_its_path_with_its_most_attended_key():
    reading = kq.attribute(kq.models.DECODER, kq.models.LONG_TEXT, head="3.1", query=9, length=10)
    model, ids = LanguageModel.load(kq.models.DECODER), load_tokenizer(kq.models.DECODER)
    batch = next(text_batches(read_lines(kq.models.LONG_TEXT), ids, 10, 10))
    maps = attention_maps(model, batch)[3]
    assert reading.key == int(maps[0, 1, 9].argmax())
    assert reading.weight == pytest.approx(float(maps[0, 1, 9].max()), abs=1e-5)
    assert (reading.model["name"], len(reading.tokens)) == (kq.models.DECODER.name, 10)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "qwen2"])
def test_symmetric_entries_are_those_of_the_form_with_contents_exchanged(name):
    """Entry and exchanged entry from the dense form M(Δ) on the writes, which are taken off the model by hand."""
    model = build(name)
    layer = kq.read(model)[1]
    query, key = 4, 1
    sources = _writes(model, name)
    reading = kq.attribute(model, inputs=inputs(model), head="1.3", query=query, key=key)
    form = layer.head(3, "biased")
    form = form if layer.rope is None else form.at(key - query, layer.rope)
    for a, b in (("0.1", "0.2"), ("0.3", "0.3"), ("0.2", "0.1")):
        x, y = ((torch.nn.functional.pad(sources[s], (0, form.dim - sources[s].shape[-1]))) for s in (a, b))
        straight, exchanged = (
            layer.scale * float(form.scores(*pair)) for pair in ((x[query], y[key]), (y[key], x[query]))
        )
        place = reading.sources.index(a), reading.sources.index(b)
        assert reading.table["raw"][place[0]][place[1]] == pytest.approx(straight, rel=1e-4, abs=1e-6)
        symmetric = reading.table["raw_symmetric"][place[0]][place[1]]
        assert symmetric == pytest.approx((straight + exchanged) / 2, rel=1e-4, abs=1e-6)


def _writes(model, name):
    """What each head of layer 0 adds to the input of layer 1's projections, without keyquery."""
    blocks = model.layers if name == "qwen2" else model.h
    output = {"gpt2": "attn.c_proj", "gptj": "attn.out_proj", "qwen2": "self_attn.o_proj"}[name]
    norm = blocks[1].input_layernorm if name == "qwen2" else blocks[1].ln_1
    seen = {}
    handles = [
        blocks[0].get_submodule(output).register_forward_pre_hook(lambda m, a: seen.update(context=a[0])),
        norm.register_forward_pre_hook(lambda m, a: seen.update(residual=a[0])),
    ]
    with torch.no_grad():
        model(**inputs(model))
    for handle in handles:
        handle.remove()
    weight = blocks[0].get_submodule(output).weight.detach()
    weight = weight if name == "gpt2" else weight.mT  # (heads·r, d)
    context, residual = seen["context"].reshape(-1, len(weight)), seen["residual"][0]
    out = {}
    for head, (z, w) in enumerate(zip(context.chunk(4, -1), weight.chunk(4, 0), strict=True)):
        write = z @ w
        if name == "qwen2":
            size = (residual.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        else:
            write = write - write.mean(-1, keepdim=True)
            size = (residual.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        out[f"0.{head}"] = write / size * norm.weight.detach()
    return out


def test_removing_a_source_from_the_keys_alone_changes_the_score_by_its_entry():
    """Patching: the write of head 0.2 is taken out of what enters the key projection, and nothing else."""
    model = build("llama")
    removed = _writes_of_llama(model)
    before = softmax_inputs(model)["layers.1.self_attn"]
    change = model.layers[1].self_attn.k_proj.register_forward_pre_hook(lambda m, a: (a[0] - removed,))
    after = softmax_inputs(model)["layers.1.self_attn"]
    change.remove()
    for query, key in ((5, 2), (3, 3)):
        reading = kq.attribute(model, inputs=inputs(model), head="1.1", query=query, key=key)
        difference = float(before[1, query, key] - after[1, query, key])
        assert reading.by_source("key", "raw")["0.2"] == pytest.approx(difference, rel=1e-4, abs=1e-6)
        seen = slice(query + 1)
        mean = float((before - after)[1, query, seen].mean())
        assert reading.by_source("key")["0.2"] == pytest.approx(difference - mean, rel=1e-4, abs=1e-6)


def _writes_of_llama(model):
    seen = {}
    handles = [
        model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda m, a: seen.update(context=a[0])),
        model.layers[1].input_layernorm.register_forward_pre_hook(lambda m, a: seen.update(residual=a[0])),
    ]
    with torch.no_grad():
        model(**inputs(model))
    for handle in handles:
        handle.remove()
    weight, norm = model.layers[0].self_attn.o_proj.weight.detach(), model.layers[1].input_layernorm
    width = weight.shape[1] // 4
    write = seen["context"][..., 2 * width : 3 * width] @ weight[:, 2 * width : 3 * width].mT
    size = (seen["residual"].square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    return write / size * norm.weight.detach()


@pytest.mark.slow
def test_shares_of_all_pairs_are_covariances_with_the_score():
    model, ids = build("qwen3"), IDS[:, :3]
    scores = softmax_inputs(model, ids)["layers.1.self_attn"][2].double()
    reading = kq.attribute(model, inputs=inputs(model, ids), head="1.2")
    expected, total = dict.fromkeys(reading.sources, 0.0), 0.0
    for query in range(3):
        deviation = scores[query, : query + 1] - scores[query, : query + 1].mean()
        total += float(deviation.square().sum())
        for key in range(query + 1):
            pair = kq.attribute(model, inputs=inputs(model, ids), head="1.2", query=query, key=key)
            for name, value in pair.by_source("key", "raw").items():
                expected[name] += value * float(deviation[key])
    shares = reading.by_source("key")
    assert sum(shares.values()) == pytest.approx(1)
    assert shares == pytest.approx({name: value / total for name, value in expected.items()}, abs=1e-4)
