"""Bad input to `attribute` and `wiring`: one sentence each; and features as sources."""

from __future__ import annotations

import pytest
import torch

import keyquery as kq
from tests.instruments.attribution.models import IDS, build, inputs, softmax_inputs

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "7.0"}, "no self-attention layer 7"),
        ({"head": "1.9"}, "layer 1 has no head 9"),
        ({"head": "1.*"}, "head must name one head"),
        ({"head": "1.0", "query": 2, "key": 4}, "key 4 is not visible to query 2 in 1.0: it comes after the query"),
        ({"head": "1.0", "query": 9}, "query must be between 0 and 5, got 9"),
        ({"head": "1.0", "key": 1}, "key needs query"),
        ({"head": "1.0", "depth": 2}, "depth 2 follows one pair of tokens"),
        ({"head": "1.0", "query": 2, "depth": 3}, "depth must be between 1 and 2, got 3"),
        ({"head": "1.0", "sequence": 4}, "sequence must be between 0 and 0, got 4"),
        ({"head": "1.0", "features": {"a": (torch.ones(3), torch.ones(6))}}, r"direction must have shape \(d,\)"),
        ({"head": "1.0", "features": {"a": (torch.ones(32), torch.ones(5))}}, r"activation must have shape \(n,\)"),
    ],
)
def test_arguments_are_refused_in_one_sentence(llama, options, message):
    with pytest.raises(ValueError, match=message) as raised:
        kq.attribute(llama, inputs=inputs(llama), **options)
    assert "\n" not in str(raised.value)


def test_data_is_required(llama):
    with pytest.raises(ValueError, match="pass text or inputs"):
        kq.attribute(llama, head="0.0")
    with pytest.raises(ValueError, match="pass text or inputs"):
        kq.wiring(llama)
    with pytest.raises(ValueError, match="needs at least two"):
        kq.wiring(llama, inputs=inputs(llama))
    with pytest.raises(ValueError, match="features must hold at least one"):
        kq.attribute(llama, inputs=inputs(llama), head="0.0", features={})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("albert", "is called 2 times per run"),
        ("deberta_v2", "cannot be attributed: its scores have terms between contents and positions"),
    ],
)
def test_models_whose_scores_cannot_be_attributed_are_refused(name, message):
    with pytest.raises(ValueError, match=message) as raised:
        kq.attribute(build(name), inputs={"input_ids": IDS}, head="0.1", query=3, key=1)
    assert "\n" not in str(raised.value)


def test_a_stream_that_is_no_sum_of_writes_is_refused(llama):
    """A block that squashes the stream: what enters the next layer is not linear in any write."""
    handle = llama.layers[0].register_forward_hook(lambda module, args, out: torch.tanh(out))
    with pytest.raises(ValueError, match="not a sum of writes"):
        kq.attribute(llama, inputs=inputs(llama), head="1.0", query=3, key=1)
    handle.remove()


def test_the_model_is_left_as_it_was(llama):
    before = softmax_inputs(llama)
    llama.set_attn_implementation("sdpa")
    reading = kq.attribute(llama, inputs=inputs(llama), head="1.2", query=5, key=2)
    assert llama.config._attn_implementation == "sdpa"
    llama.set_attn_implementation("eager")
    after = softmax_inputs(llama)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert reading.score == pytest.approx(float(before["layers.1.self_attn"][2, 5, 2]), rel=1e-4)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in llama.modules())


def test_features_are_sources_and_the_rest_is_other(llama):
    """A feature that is the whole residual stream of the block leaves nothing; half of it leaves half."""
    seen = {}
    handle = llama.layers[1].register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    with torch.no_grad():
        llama(**inputs(llama))
    handle.remove()
    stream = seen["x"][0]
    directions = torch.linalg.svd(stream, full_matrices=False)[2]
    features = {f"f{i}": (direction, stream @ direction) for i, direction in enumerate(directions)}
    options = {"inputs": inputs(llama), "head": "1.0", "query": 5, "key": 2}
    reading = kq.attribute(llama, **options, features=features)
    plain = kq.attribute(llama, **options)
    assert [*reading.sources] == [*features, "other", "bias"]
    assert reading.score == pytest.approx(plain.score, rel=1e-4)
    assert reading.by_source("key", "raw")["other"] == pytest.approx(0, abs=1e-4 * abs(plain.score))
    few = kq.attribute(llama, **options, features={"f0": features["f0"]})
    assert few.by_source("key", "raw")["f0"] == pytest.approx(reading.by_source("key", "raw")["f0"], rel=1e-4)
    assert sum(few.by_source("key", "raw").values()) == pytest.approx(plain.score, rel=1e-4)


def test_half_precision_leaves_its_rounding_as_a_source():
    model = build("llama").bfloat16()
    reading = kq.attribute(model, inputs=inputs(model), head="1.0", query=5, key=2)
    assert "rounding" in reading.sources
    assert sum(reading.by_source("key", "raw").values()) == pytest.approx(reading.score, rel=1e-4)
