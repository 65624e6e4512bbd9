"""Null levels of an attribution, and a path taken out of one side of a head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import keyquery as kq
from tests.instruments.attribution.models import build, inputs

pytest.importorskip("transformers")


@pytest.mark.slow
def test_null_levels_are_those_of_shuffled_tokens():
    """In an encoder without RoPE, an order brings to a query what any other token would read there, all as often."""
    torch.manual_seed(0)
    model = kq.Encoder(8, depth=2, heads=2).eval()
    batch = {"x": torch.randn(1, 12, 8)}
    readings = [kq.attribute(model, inputs=batch, head="1.0", query=query, key=2) for query in range(12)]
    for source in ("input embedding", "0.1", "mlp 0"):
        sums = np.sort([abs(reading.by_source("query")[source]) for reading in readings])
        for reading in readings[:2]:  # the same levels, wherever the query stands
            level = reading.null["query"][reading.sources.index(source)]
            assert sums[-3] * 0.999 <= level <= sums[-1] * 1.001


@pytest.mark.parametrize("side", ["query", "key"])
def test_removal_is_that_of_the_running_model(side):
    """The write of head 0.1 through the frozen norm, subtracted from what enters one projection of layer 1."""
    model = build("llama")
    layer, write = model.layers[1], _writes(model, "llama")["0.1"][None]
    reading = kq.attribute(model, inputs=inputs(model), head="1.2", query=5, key=2, without="0.1", side=side)
    projection = layer.self_attn.q_proj if side == "query" else layer.self_attn.k_proj
    hook = projection.register_forward_pre_hook(lambda m, args: (args[0] - write,))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        after = model(**inputs(model), output_attentions=True).attentions[1][0, 2, 5, 2]
    hook.remove()
    [pair] = reading.ablated["pairs"]
    assert pair["weight"] == pytest.approx(reading.weight)
    assert pair["without"] == pytest.approx(float(after), rel=1e-4)
    assert abs(pair["without"] - pair["weight"]) > 1e-4 * pair["weight"]


def test_attention_and_its_largest_pairs_are_those_of_a_capped_model():
    model = build("gemma2")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attention = model(**inputs(model), output_attentions=True).attentions[1][0, 2]
    reading = kq.attribute(model, inputs=inputs(model), head="1.2", without="bias")
    for pair in reading.pairs:
        assert pair["weight"] == pytest.approx(float(attention[pair["query"], pair["key"]]), abs=1e-5)
    assert [row["weight"] for row in reading.ablated["pairs"]] == [pair["weight"] for pair in reading.pairs]


@pytest.mark.parametrize("name", ["gpt2", "gptj", "qwen2"])
def test_symmetric_entries_are_those_of_the_form_with_contents_exchanged(name):
    """Entry and exchanged entry from the dense form M(Δ) on the writes, which are taken off the model by hand."""
    model = build(name)
    layer = kq.read(model)[1]
    query, key = 4, 1
    writes = _writes(model, name)
    reading = kq.attribute(model, inputs=inputs(model), head="1.3", query=query, key=key)
    form = layer.head(3, "biased")

    def entry(x, y, k):
        at = form if layer.rope is None else form.at(k - query, layer.rope)
        return layer.scale * float(at.scores(*(torch.nn.functional.pad(v, (0, form.dim - len(v))) for v in (x, y))))

    for a, b in (("0.1", "0.2"), ("0.3", "0.3"), ("0.2", "0.1")):
        x, y = writes[a], writes[b]
        straight = np.array([entry(x[query], y[k], k) for k in range(query + 1)])
        exchanged = np.array([entry(y[k], x[query], k) for k in range(query + 1)])
        cell = reading.sources.index(a), reading.sources.index(b)
        assert reading.table["raw"][cell[0]][cell[1]] == pytest.approx(straight[key], rel=1e-4, abs=1e-6)
        expected = (straight[key] - straight.mean() + exchanged[key] - exchanged.mean()) / 2
        assert reading.table["symmetric"][cell[0]][cell[1]] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def _writes(model, name):
    """What each head of layer 0 adds to the input of layer 1's projections, without keyquery."""
    blocks = model.h if name.startswith("gpt") else model.layers
    output = {"gpt2": "attn.c_proj", "gptj": "attn.out_proj"}.get(name, "self_attn.o_proj")
    norm = blocks[1].ln_1 if name.startswith("gpt") else blocks[1].input_layernorm
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
        if not name.startswith("gpt"):
            size = (residual.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        else:
            write = write - write.mean(-1, keepdim=True)
            size = (residual.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        out[f"0.{head}"] = write / size * norm.weight.detach()
    return out
