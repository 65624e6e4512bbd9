"""A plain vision Transformer: patches lit by heads, with the popularity of keys taken out."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.listening import queries_and_keys
from tests import vision

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def measured():
    model, processor = vision.vit(), vision.vit_processor()
    return model, kq.flow(model, image=vision.photograph(), processor=processor, keep=8)


def pixels():
    return vision.vit_processor()(images=vision.photograph(), return_tensors="pt")["pixel_values"]


def blocks_of(blocks):
    return {(block["from"], block["to"]): np.array(block["map"]) for block in blocks}


def test_class_token_and_patches_are_the_two_modalities(measured):
    model, reading = measured
    assert reading.modalities == ["class", "image"]
    assert reading.counts == {"class": 1, "image": 16}
    assert reading.picture["grid"] == [4, 4]
    assert reading.tokens[:2] == ["class token", "patch 1,1"]
    assert len(reading.maps) == 8
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(pixels(), output_attentions=True).attentions
    for one in reading.maps:
        head = attentions[one["layer"]][0, one["head"]].numpy()
        blocks = blocks_of(one["blocks"])
        np.testing.assert_allclose(blocks["image", "class"], head[:1, 1:], rtol=1e-3)
        np.testing.assert_allclose(blocks["image", "image"], head[1:, 1:], rtol=1e-3)


def test_popularity_is_the_mean_query_with_the_keys(measured):
    """p_j = scale·q̄·(k_j − k̄): means over all queries, and over the keys of the modality."""
    model, reading = measured
    heads = kq.read(model)
    projected = queries_and_keys(model, {"pixel_values": pixels()}, heads)
    for one in reading.maps:
        query, key = (t[one["head"]].double() for t in projected[one["layer"]])
        scores = heads[one["layer"]].scale * query.mean(0) @ key.mT
        expected = scores[1:] - scores[1:].mean()
        np.testing.assert_allclose(one["popularity"][1:], expected, rtol=2e-3, atol=1e-3)
        assert one["popularity"][0] == pytest.approx(0, abs=1e-6)  # a single key has no popularity against others


def test_without_popularity_is_the_dialled_attention(measured):
    """Within a modality, what `kq.dial(popularity=0)` gives."""
    model, reading = measured
    model.set_attn_implementation("eager")
    one = next(one for one in reading.maps if one["layer"] == 0)  # later layers would get other inputs
    with kq.dial(model, popularity=0, heads=(0, one["head"])), torch.no_grad():
        dialled = model(pixels(), output_attentions=True).attentions[0][0, one["head"]].numpy()
    rest = blocks_of(reading.without_popularity(0, one["head"]))
    whole = blocks_of(one["blocks"])
    for to, rows in (("class", slice(0, 1)), ("image", slice(1, None))):
        expected = dialled[rows, 1:] / dialled[rows, 1:].sum(-1, keepdims=True)
        mass = whole["image", to].sum(-1, keepdims=True)
        np.testing.assert_allclose(rest["image", to], expected * mass, rtol=5e-3, atol=1e-5)
        assert np.abs(rest["image", to] - whole["image", to]).max() > 1e-3


def test_a_sink_that_every_query_sees_is_gone():
    scores = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = ["text"] * 5 + ["image"] * 7
    sunk = scores.clone()
    sunk[:, 8] += 6
    plain, with_sink = (kq.flow(s.softmax(-1), labels, keep=1) for s in (scores, sunk))
    shares = [blocks_of(reading.without_popularity(0, 0))["image", "text"] for reading in (plain, with_sink)]
    shares = [rows / rows.sum(-1, keepdims=True) for rows in shares]
    np.testing.assert_allclose(*shares, rtol=1e-2)
    raw = blocks_of(with_sink.maps[0]["blocks"])["image", "text"]
    assert (raw.argmax(-1) == 3).all()
    assert len(set(shares[1].argmax(-1))) > 1


def test_under_a_causal_mask_queries_behind_the_keys_count():
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    attention = torch.randn(6, 6, dtype=torch.float64).masked_fill(~mask, -torch.inf).softmax(-1)
    reading = kq.flow(attention, ["image"] * 3 + ["text"] * 3, mask=mask, keep=1)
    popularity = reading.maps[0]["popularity"]
    rows = attention[2:, :3].log()
    expected = (rows - rows.mean(-1, keepdim=True)).mean(0)
    np.testing.assert_allclose(popularity[:3], expected, rtol=1e-3)
    assert popularity[3:] == [None] * 3  # one query sees all of the text: it has no popularity
    with pytest.raises(ValueError, match="popularity of text is undefined: fewer than two queries see all of it"):
        reading.without_popularity(0, 0)
    with pytest.raises(ValueError, match=r"the maps of head 0\.3 were not kept: raise keep"):
        reading.without_popularity(0, 3)


def test_bad_input_in_one_sentence():
    photo = vision.photograph()
    for model, processor, sentence in (
        (vision.vilt(), vision.vilt_processor(), "ViltModel is no plain vision Transformer: pass a text"),
        (vision.vit(), None, "an image needs an image processor, and none was passed or found"),
        (vision.vit(), vision.tokenizer(), "an image needs an image processor, and none was passed or found"),
    ):
        with pytest.raises(ValueError, match=sentence):
            kq.flow(model, image=photo, processor=processor)


def test_models_without_a_class_token_are_refused():
    from transformers import SiglipVisionConfig, SiglipVisionModel

    model = SiglipVisionModel(SiglipVisionConfig(**vision.SMALL, image_size=32, patch_size=8)).eval()
    with pytest.raises(ValueError, match="has patches only, without a class token"):
        kq.flow(model, image=vision.photograph(), processor=vision.vit_processor())
