"""Whose tokens are whose in models of images and texts, and where patches lie."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

import keyquery as kq
from keyquery.instruments.flow.modality import patch_order
from keyquery.listening import attention_maps, queries_and_keys
from keyquery.proof.families import tiny_model
from tests import vision
from tests.instruments.flow.test_measure import assert_same

pytest.importorskip("transformers")


def seen(processor, text=vision.TEXT):
    return dict(processor(images=vision.photograph(), text=text, return_tensors="pt"))


def test_words_and_patches_of_vilt():
    model, processor = vision.vilt(), vision.vilt_processor()
    batch = seen(processor)
    torch.manual_seed(3)
    reading = kq.flow(model, inputs=batch, processor=processor, keep=2)
    assert reading.counts == {"special": 3, "text": 6, "image": 5 * 4}
    assert reading.modalities == ["text", "image"]
    assert reading.tokens[:9] == ["[CLS]", "a", "cat", "left", "of", "the", "truck", "[SEP]", "[image]"]
    assert sorted(reading.tokens[9:]) == [f"patch {row},{column}" for row in range(1, 5) for column in range(1, 6)]
    torch.manual_seed(3)
    assert_same(reading, kq.flow(attention_maps(model, batch), reading.labels))
    assert reading.provenance["special"] == "left out"
    counted = kq.flow(model, counted=True, inputs=batch, processor=processor)
    assert counted.modalities == ["special", "text", "image"]
    assert counted.picture is None
    picture = reading.picture
    assert picture["grid"] == [4, 5]
    assert sorted(picture["places"]) == [[row, column] for row in range(4) for column in range(5)]
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["data"])))).astype(float)
    original = np.asarray(vision.photograph().resize((40, 32))).astype(float)
    assert np.abs(shown - original).mean() < 12  # a JPEG, resized by another filter


def test_patches_in_the_order_that_vilt_draws_them():
    # Where each patch lies, told by the patch itself: its colours are its row and its column.
    model, batch = vision.vilt(), seen(vision.vilt_processor())
    tall, wide = (side // 8 for side in batch["pixel_values"].shape[-2:])
    rows = torch.arange(tall).repeat_interleave(8).view(-1, 1).expand(-1, 8 * wide)
    columns = torch.arange(wide).repeat_interleave(8).expand(8 * tall, -1)
    batch["pixel_values"] = torch.stack([rows, columns, 0 * rows])[None].float()
    with torch.no_grad():
        for weight in (model.embeddings.patch_embeddings.projection.weight, model.embeddings.position_embeddings):
            weight.zero_()
        model.embeddings.patch_embeddings.projection.bias.zero_()
        model.embeddings.token_type_embeddings.weight.zero_()
        model.embeddings.patch_embeddings.projection.weight[[0, 1], [0, 1]] = 1 / 64
    drawn = []
    hook = model.embeddings.register_forward_hook(lambda module, args, out: drawn.append(out[0]))
    torch.manual_seed(7)
    with patch_order(model) as order, torch.no_grad():
        model(**batch)
    hook.remove()
    assert "visual_embed" not in vars(model.embeddings)
    expected = drawn[0][0, 9:, :2].round().long().tolist()
    assert order[0].tolist() == expected != sorted(expected)


def test_patches_among_the_words_of_llava():
    model, processor = vision.llava(), vision.llava_processor()
    model.set_attn_implementation("sdpa")
    batch = seen(processor, f"<image> {vision.TEXT}")
    reading = kq.flow(model, text=vision.TEXT, image=vision.photograph(), processor=processor, keep=1)
    assert model.config._attn_implementation == "sdpa"
    assert reading.labels == ["special", *["image"] * 16, *["text"] * 6, "special"]
    n = len(reading.labels)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    assert_same(reading, kq.flow(attention_maps(model, batch), reading.labels, mask=mask))
    assert np.array(reading.directed["text", "image"]).max() == 0  # words stand behind the patches
    assert (reading.picture["grid"], reading.picture["places"][5]) == ([4, 4], [1, 1])


def test_class_token_and_patches_of_a_plain_vision_transformer():
    model, processor = vision.vit(), vision.vit_processor()
    pixels = processor(images=vision.photograph(), return_tensors="pt")["pixel_values"]
    reading = kq.flow(model, image=np.asarray(vision.photograph()), processor=processor, keep=8)
    assert (reading.modalities, reading.counts) == (["class", "image"], {"class": 1, "image": 16})
    assert reading.tokens[:2] == ["class token", "patch 1,1"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(pixels, output_attentions=True).attentions
    heads = kq.read(model)
    projected = queries_and_keys(model, {"pixel_values": pixels}, heads)
    assert len(reading.maps) == 8
    for row in reading.maps:
        layer, head = row["layer"], row["head"]
        maps = {(block["from"], block["to"]): block["map"] for block in row["blocks"]}
        np.testing.assert_allclose(maps["image", "class"], attentions[layer][0, head, :1, 1:], rtol=1e-3)
        np.testing.assert_allclose(maps["image", "image"], attentions[layer][0, head, 1:, 1:], rtol=1e-3)
        # Popularity: p_j = scale·q̄·(k_j − k̄), means over all queries, and over the keys of the modality.
        query, key = (t[head].double() for t in projected[layer])
        scores = heads[layer].scale * query.mean(0) @ key.mT
        np.testing.assert_allclose(row["popularity"][1:], scores[1:] - scores[1:].mean(), rtol=2e-3, atol=1e-3)
        assert row["popularity"][0] == pytest.approx(0, abs=1e-6)  # a single key has no popularity against others
    head = next(row["head"] for row in reading.maps if row["layer"] == 0)  # later layers would get other inputs
    with kq.dial(model, popularity=0, heads=(0, head)), torch.no_grad():
        dialled = model(pixels, output_attentions=True).attentions[0][0, head, 1:, 1:].numpy()
    rest = next(b["map"] for b in reading.without_popularity(0, head) if (b["from"], b["to"]) == ("image", "image"))
    shares = np.array(rest) / np.sum(rest, -1, keepdims=True)
    np.testing.assert_allclose(shares, dialled / dialled.sum(-1, keepdims=True), rtol=5e-3, atol=1e-5)


@pytest.mark.parametrize("folder", [kq.models.ENCODER, kq.models.DECODER])
def test_two_texts_of_a_shipped_model(folder):
    reading = kq.flow(folder, text=["The ship was old.", "It’s naïve."])
    assert reading.modalities == ["first text", "second text"]
    assert reading.tokens[:6] == ["The", "ship", "was", "old", ".", "It"]
    assert "naïve" in "".join(reading.tokens)
    assert not set("".join(reading.tokens)) & set("ĠĊâĢÃ")
    assert reading.labels[:6] == ["first text"] * 5 + ["second text"]
    assert np.shape(reading.raw) == (4, 4)
    assert (np.array(reading.directed["second text", "first text"]).max() == 0) == (folder == kq.models.DECODER)


def test_two_texts_as_a_tokenizer_joins_them():
    model = tiny_model("bert", vocab_size=len(vision.WORDS))
    reading = kq.flow(model, text=["a cat", "the dog left"], processor=vision.tokenizer())
    assert reading.tokens == ["[CLS]", "a", "cat", "[SEP]", "the", "dog", "left", "[SEP]"]
    first, second = "first text", "second text"
    assert reading.labels == ["special", first, first, "special", second, second, second, "special"]
    ids = torch.tensor([[2, 6, 7, 3, 12, 13, 8, 3]])
    kinds = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    maps = attention_maps(model, {"input_ids": ids, "token_type_ids": kinds})
    assert_same(reading, kq.flow(maps, reading.labels))


@pytest.mark.parametrize(("mode", "size"), [("LA", (33, 31)), ("P", (90, 40)), ("CMYK", (20, 37)), ("RGB", (1, 1))])
def test_images_of_any_mode_and_size(mode, size, tmp_path):
    path = tmp_path / ("image.jpg" if mode == "CMYK" else "image.png")
    vision.photograph(mode, size=size).save(path)
    for model, processor in ((vision.vilt(), vision.vilt_processor()), (vision.llava(), vision.llava_processor())):
        reading = kq.flow(model, text=vision.TEXT, image=path, processor=processor, keep=1)
        tall, wide = reading.picture["grid"]
        assert reading.counts["image"] == tall * wide > 0


def siglip():
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(SiglipVisionConfig(**vision.SMALL, image_size=32, patch_size=8)).eval()


def bert():
    return tiny_model("bert", vocab_size=len(vision.WORDS))


def encoder():
    return kq.Encoder(8, 1, 2)


IMAGE = {"image": vision.photograph()}
BOTH = {"text": "a cat", **IMAGE}
VILT, BERT, IDS = (vision.vilt, vision.vilt_processor), (bert, vision.tokenizer), torch.ones(1, 4).long()


@pytest.mark.parametrize(
    ("model", "processor", "options", "sentence"),
    [
        (vision.vilt, None, {}, "a model needs either inputs, or text and image"),
        (vision.vilt, None, {"inputs": {}, "mask": torch.ones(1)}, "mask is only for a tensor"),
        (vision.vilt, None, BOTH, "text and image need a processor"),
        (*VILT, {**BOTH, "text": ["a cat", ""]}, "text must contain words"),
        (*VILT, {**BOTH, "text": "cat " * 60}, "62 tokens, and ViltModel takes at most 40"),
        (*VILT, {**BOTH, "text": ["a", "cat"]}, "an image needs exactly one text, got 2"),
        (*VILT, {**BOTH, "image": "none.png"}, "there is no image"),
        (*VILT, {**BOTH, "image": vision.photograph(size=(3, 64))}, "ViltProcessor rejects an image of 3 × 64: "),
        (*VILT, IMAGE, "ViltModel is no plain vision Transformer"),
        (vision.vit, vision.tokenizer, IMAGE, "an image needs an image processor"),
        (siglip, vision.vit_processor, IMAGE, "has patches only, without a class token"),
        (vision.clip, vision.clip_processor, BOTH, "CLIPModel has separate text and image towers without attention"),
        (*BERT, BOTH, "BertModel takes no image: it has no image processor; pass two texts"),
        (*BERT, {"text": "a cat"}, "pass a text and an image, or two texts, got 1"),
        (bert, None, {"inputs": {"input_ids": IDS}}, "BertModel: image tokens not found"),
        (encoder, None, {"inputs": {"x": torch.zeros(1, 4, 8)}}, "Encoder does not define the modality of its tokens"),
    ],
)
def test_what_a_model_cannot_be_given(model, processor, options, sentence):
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        kq.flow(model(), processor=processor and processor(), **options)
