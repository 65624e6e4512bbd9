"""The table sums to the score of the model, in every architecture."""

from __future__ import annotations

from functools import partial

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
    captured = softmax_inputs(model)
    heads = kq.read(model)
    layer = [layer for layer in heads if layer.kind == "self"][-1]
    scores = captured[module_of(layer)]
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


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "1.9"}, "layer 1 has no head 9"),
        ({"head": "1.*"}, "head must name one head"),
        ({"head": "1.0", "query": 2, "key": 4}, "key 4 is not visible to query 2 in 1.0: it comes after the query"),
        ({"head": "1.0", "query": 9}, "query must be between 0 and 5, got 9"),
        ({"head": "1.0", "key": 1}, "key needs query"),
        ({"head": "1.0", "depth": 2}, "depth 2 follows one pair of tokens"),
        ({"head": "1.0", "query": 2, "depth": 3}, "depth must be between 1 and 2, got 3"),
        ({"head": "1.0", "sequence": 4}, "sequence must be between 0 and 0, got 4"),
        ({"head": "1.0", "features": {"a": (torch.ones(32), torch.ones(5))}}, r"activation must have shape \(n,\)"),
        ({"head": "0.0", "features": {}}, "features must map names"),
        ({"head": "1.0", "without": "1.0"}, r"without must name a source of this head, such as '0\.3', got '1\.0'"),
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


def squashed():
    """A model whose second layer reads what is not linear in any write."""
    model = build("llama")
    model.layers[0].register_forward_hook(lambda module, args, out: torch.tanh(out))
    return model


def scaled():
    """A model with other scores than its weights give."""
    model = build("llama")
    model.layers[1].self_attn.q_proj.register_forward_hook(lambda module, args, out: 2 * out)
    return model


@pytest.mark.parametrize(
    ("make", "head", "message"),
    [
        (partial(build, "albert"), "0.1", "is called 2 times per run"),
        (partial(build, "deberta_v2"), "0.1", "its scores have terms between contents and positions"),
        (squashed, "1.2", "not a sum of writes"),
        (scaled, "1.2", "the scores read from its weights are not those of the model"),
    ],
)
def test_models_whose_scores_cannot_be_attributed_are_refused(make, head, message):
    with pytest.raises(ValueError, match=message) as raised:
        kq.attribute(make(), inputs={"input_ids": IDS}, head=head, query=3, key=1)
    assert "\n" not in str(raised.value)


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
