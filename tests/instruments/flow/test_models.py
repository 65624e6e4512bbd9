"""Flow in running models: whose tokens are whose, what they attend with, and that they are left as they were."""

import base64
import io

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.instruments.flow.modality import patch_order
from keyquery.listening import attention_maps
from keyquery.listening.inputs.word_pieces import token_texts
from keyquery.proof.families import tiny_inputs, tiny_model
from tests import vision

pytest.importorskip("transformers")


def seen(processor, text=vision.TEXT, **options):
    return dict(processor(images=vision.photograph(**options), text=text, return_tensors="pt"))


def same(reading, expected, *names):
    for name in names or ("raw", "residual", "corrected", "rollout", "symmetry", "special"):
        assert np.allclose(getattr(reading, name), getattr(expected, name), atol=1e-6), name


def test_words_and_patches_of_vilt():
    model, batch = vision.vilt(), seen(vision.vilt_processor())
    torch.manual_seed(3)
    reading = kq.flow(model, inputs=batch, processor=vision.vilt_processor())
    assert reading.counts == {"special": 3, "text": 6, "image": 5 * 4}
    assert reading.tokens[:8] == ["[CLS]", "a", "cat", "left", "of", "the", "truck", "[SEP]"]
    assert reading.tokens[8] == "[image]"
    assert sorted(reading.tokens[9:]) == [f"patch {row},{column}" for row in range(1, 5) for column in range(1, 6)]
    labels = ["special", *["text"] * 6, "special", "special", *["image"] * 20]
    assert reading.labels == labels
    torch.manual_seed(3)
    same(reading, kq.flow(attention_maps(model, batch), labels))
    assert reading.modalities == ["text", "image"]
    assert reading.notes == []


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
    found = drawn[0][0, 9:, :2].round().long()
    assert order[0].tolist() == found.tolist()
    assert order[0].tolist() != sorted(order[0].tolist())  # an order of its own


def test_the_picture_is_what_the_model_sees():
    from PIL import Image

    reading = kq.flow(
        vision.vilt(),
        text=vision.TEXT,
        image=np.asarray(vision.photograph()),
        processor=vision.vilt_processor(),
        keep=2,
    )
    picture = reading.picture
    assert picture["grid"] == [4, 5]
    assert sorted(picture["places"]) == [[row, column] for row in range(4) for column in range(5)]
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["data"])))).astype(float)
    original = np.asarray(vision.photograph().resize((40, 32))).astype(float)
    assert shown.shape == (32, 40, 3)
    assert np.abs(shown - original).mean() < 12  # a JPEG, resized by another filter
    assert len(reading.maps) == 2
    assert np.shape(reading.maps[0]["blocks"][0]["map"]) in ((6, 20), (20, 6))
    assert kq.flow(vision.vilt(), inputs=seen(vision.vilt_processor())).picture is None


def test_patches_among_the_words_of_llava():
    model, processor = vision.llava(), vision.llava_processor()
    model.set_attn_implementation("sdpa")
    batch = seen(processor, f"<image> {vision.TEXT}")
    reading = kq.flow(model, text=vision.TEXT, image=vision.photograph(), processor=processor, keep=1)
    assert model.config._attn_implementation == "sdpa"
    assert reading.labels == ["special", *["image"] * 16, *["text"] * 6, "special"]
    n = len(reading.labels)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    same(reading, kq.flow(attention_maps(model, batch), reading.labels, mask=causal))
    assert np.array(reading.directed["text", "image"]).max() == 0  # words stand behind the patches
    assert reading.picture["grid"] == [4, 4]
    assert reading.picture["places"][5] == [1, 1]


def test_what_a_detector_found_behind_the_words():
    model = vision.visual_bert()
    batch = {"input_ids": torch.tensor([[2, 6, 7, 3]]), "visual_embeds": torch.randn(1, 5, 16)}
    reading = kq.flow(model, inputs=batch)
    assert reading.labels == ["text"] * 4 + ["image"] * 5
    same(reading, kq.flow(attention_maps(model, batch), reading.labels))


def test_one_text_or_several():
    model = vision.visual_bert()
    batch = {"input_ids": torch.tensor([[2, 6, 7, 3], [2, 8, 3, 0]]), "visual_embeds": torch.randn(2, 5, 16)}
    batch |= {"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]), "visual_attention_mask": torch.ones(2, 5)}
    reading = kq.flow(model, inputs=batch)
    assert np.shape(reading.raw) == (2, 2, 4)
    for text, words in ((0, 4), (1, 3)):
        alone = {"input_ids": batch["input_ids"][text : text + 1, :words]}
        alone |= {"visual_embeds": batch["visual_embeds"][text : text + 1]}
        one = kq.flow(model, inputs=alone)
        for name in ("raw", "residual", "weighted", "corrected", "symmetry", "rollout"):
            assert np.allclose(np.array(getattr(reading, name))[:, text], getattr(one, name), atol=1e-5), name


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_norm_weighted_flow_is_that_of_what_is_carried(name):
    model = tiny_model(name).double()
    batch = {"input_ids": torch.randint(3, 60, (1, 9))}
    labels = ["one"] * 5 + ["two"] * 4
    reading = kq.flow(model, labels, inputs=batch)
    heads, maps = kq.read(model), attention_maps(model, batch)
    for layer in range(2):
        carried = heads.values(layer)
        entered = {}
        module = model.get_submodule(heads[layer].modules["value"])
        hook = module.register_forward_pre_hook(lambda module, args, kept=entered: kept.update(x=args[0]))
        with torch.no_grad():
            model(**batch)
        hook.remove()
        bias = 0 if carried.value_bias is None else carried.value_bias.unsqueeze(-2)
        vectors = ((entered["x"][0] @ carried.value.mT + bias) @ carried.output).flatten(0, 1)
        for head in range(4):
            amount = torch.linalg.vector_norm(maps[layer][0, head][..., None] * vectors[head], dim=-1)
            cross = float(amount[:5, 5:].sum() + amount[5:, :5].sum())
            assert reading.weighted[layer][head] == pytest.approx(cross / float(amount.sum()), abs=1e-9)


def test_own_layers_by_their_inputs():
    model = kq.Encoder(16, 3, 2).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    labels = [0] * 4 + [1] * 5
    reading = kq.flow(model, labels, inputs={"x": x})
    same(reading, kq.flow(attention_maps(model, {"x": x}), labels))
    assert np.shape(reading.weighted) == (3, 2)
    decoder = kq.Decoder(16, 2, 2).double()
    reading = kq.flow(decoder, labels, inputs={"x": x})
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    same(reading, kq.flow(attention_maps(decoder, {"x": x}), labels, mask=causal))


def test_padding_counts_for_nothing():
    model = kq.Encoder(16, 2, 2).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    padded = torch.cat([x, torch.full((1, 3, 16), float("nan"), dtype=torch.float64)], 1)
    real = torch.ones(1, 12, dtype=torch.bool)
    real[:, 9:] = False
    labels = ["a"] * 4 + ["b"] * 5
    reading = kq.flow(model, [*labels, "b", "b", "b"], inputs={"x": padded, "mask": real})
    expected = kq.flow(model, labels, inputs={"x": x})
    same(reading, expected, "raw", "residual", "corrected", "rollout", "symmetry", "reciprocity")


@pytest.mark.parametrize("folder", [kq.models.ENCODER, kq.models.DECODER])
def test_two_texts_of_a_shipped_model(folder):
    reading = kq.flow(folder, text=["The ship was old.", "The captain was young."])
    assert reading.modalities == ["first text", "second text"]
    assert reading.tokens == ["The", "ship", "was", "old", ".", "The", "captain", "was", "young", "."]
    assert reading.labels == ["first text"] * 5 + ["second text"] * 5
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
    expected = attention_maps(model, {"input_ids": ids, "token_type_ids": kinds})
    same(reading, kq.flow(expected, reading.labels))


def test_special_tokens_are_counted_by_choice():
    options = {"inputs": seen(vision.vilt_processor()), "processor": vision.vilt_processor()}
    model = vision.vilt()
    assert kq.flow(model, counted=True, **options).modalities == ["special", "text", "image"]
    assert kq.flow(model, counted=True, **options).provenance["special"] == "counted"
    torch.manual_seed(0)
    out = kq.flow(model, **options)
    assert out.provenance["special"] == "left out"
    assert np.array(out.special).min() > 0


def test_families_whose_maps_are_not_read_say_why():
    model = tiny_model("deepseek")
    reading = kq.flow(model, [0, 0, 0, 1, 1, 1], inputs=tiny_inputs("deepseek", model))
    assert reading.weighted is None
    assert len(reading.notes) == 1
    assert "norm-weighted flow is not available" in reading.notes[0]


def test_a_tower_of_as_many_tokens_is_not_mistaken_for_the_joint_one():
    # 17 tokens of the vision tower, and as many of the language model.
    model, processor = vision.llava(), vision.llava_processor()
    batch = seen(processor, "<image>")
    assert batch["input_ids"].shape[1] == 18
    batch = {name: part[:, 1:] if name != "pixel_values" else part for name, part in batch.items()}
    reading = kq.flow(model, inputs=batch, modality=["image"] * 16 + ["text"])
    causal = torch.ones(17, 17, dtype=torch.bool).tril()
    same(reading, kq.flow(attention_maps(model, batch), reading.labels, mask=causal))


class Bytes:
    """A byte-level tokenizer of transformers as far as names of tokens go."""

    names = ("Ġcafé".replace("é", "Ã©"), "âĢĻ", "Ċ", "Ã", "Ġ", "<s>")

    def get_vocab(self):
        return {name: number for number, name in enumerate(self.names)}

    def convert_ids_to_tokens(self, ids):
        return [self.names[number] for number in ids]


def test_tokens_of_bytes_are_shown_as_text():
    assert token_texts(range(6), Bytes()) == ["café", "’", "⏎", "<0xC3>", "␣", "<s>"]

    # Letters that are byte symbols as well stay where tokens are no bytes.
    class Letters(Bytes):
        names = ("▁Ã", "ö", "▁", "##ing", "é", "Ã©")

    assert token_texts(range(6), Letters()) == ["Ã", "ö", "␣", "##ing", "é", "Ã©"]
    tokens = kq.flow(kq.models.DECODER, text=["It’s naïve.", "So it is…"]).tokens
    assert not set("".join(tokens)) & set("ĠĊâĢÃ")
    assert "naïve" in "".join(tokens)
