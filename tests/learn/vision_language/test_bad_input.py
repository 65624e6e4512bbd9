"""Images of odd sizes and modes, and what a VisualParser says to what it cannot take."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.learn.inputs.images import images_of
from tests.learn.vision_language.test_parser import fields, small, texts

Image = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(256, size=(9, 13, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def fitted():
    images, said = fields(32, 0)
    return small(epochs=1).fit(images, texts(said))


def test_grey_palette_alpha_and_paths_are_the_images_they_show(tmp_path):
    colour = Image.fromarray(PIXELS)
    grey, palette = colour.convert("L"), colour.convert("P")
    clear = colour.convert("RGBA")
    clear.putalpha(40)
    colour.save(tmp_path / "a.png")
    palette.save(tmp_path / "b.png")
    alone = images_of([PIXELS], 8)
    for same in (colour, clear, np.asarray(clear), PIXELS / 255, torch.from_numpy(PIXELS), tmp_path / "a.png"):
        assert torch.equal(images_of([same], 8), alone)
    looked_up = images_of([np.asarray(palette.convert("RGB"))], 8)
    assert torch.equal(images_of([palette], 8), looked_up)
    assert torch.equal(images_of([str(tmp_path / "b.png")], 8), looked_up)
    flat = images_of([np.repeat(np.asarray(grey)[..., None], 3, -1)], 8)
    assert torch.equal(images_of([grey], 8), flat)
    for same in (np.asarray(grey), np.asarray(grey)[..., None], np.asarray(grey.convert("LA"))):
        assert torch.equal(images_of([same], 8), flat)
    bits = Image.new("1", (5, 3), 1)
    assert (images_of([bits], 4) == 255).all()


def test_images_of_any_size_are_brought_to_one():
    wide, small_one = np.full((3, 40), 200, np.uint8), np.full((1, 1, 3), 7, np.uint8)
    found = images_of([wide, small_one, PIXELS], 16)
    assert found.shape == (3, 3, 16, 16)
    assert (found[0] == 200).all()
    assert (found[1] == 7).all()
    halved = images_of(np.arange(36, dtype=np.uint8).reshape(1, 6, 6) * 7, 2).float()
    assert halved[0, 0, 0, 0] < halved[0, 0, 0, 1] < halved[0, 0, 1, 0]  # nothing is turned
    assert torch.equal(images_of(PIXELS[None], 9), images_of([PIXELS], 9))
    exact = images_of(PIXELS[:9, :9][None], 9)
    assert torch.equal(exact[0].permute(1, 2, 0), torch.from_numpy(PIXELS[:9, :9].copy()))
    loaded = kq.data.Images(PIXELS[None], None)
    assert torch.equal(images_of(loaded, 8), images_of(PIXELS[None], 8))


@pytest.mark.parametrize(
    ("images", "error", "said"),
    [
        (PIXELS, ValueError, r"images must be \(n, h, w\).*got \(9, 13, 3\): pass one image as \[image\]"),
        (np.zeros((2, 8, 8), np.int32), ValueError, r"images must be uint8, or floats from 0 to 1, got int32"),
        (np.full((2, 8, 8), 3.0), ValueError, r"images: floats must be from 0 to 1, got 3 to 3"),
        (np.full((2, 8, 8), np.nan), ValueError, r"images: floats must be from 0 to 1"),
        (np.zeros((2, 3, 8, 8), np.uint8), ValueError, r"channels last, 1 \(grey\).*got shape \(2, 3, 8, 8\)"),
        (np.zeros((0, 8, 8), np.uint8), ValueError, r"images must not be empty"),
        ([], ValueError, r"images must hold at least one image, got none"),
        ("a.png", TypeError, r"images must be an array or a list of images, got str: pass one image as \[image\]"),
        ([np.zeros(8, np.uint8)], ValueError, r"images\[0\] must be \(h, w\) or \(h, w, c\), a path"),
        (["there is none.png"], FileNotFoundError, r"there is no image there is none.png"),
        ([Image.new("I;16", (4, 4))], ValueError, r"images\[0\] must have 8 bits per channel, got mode I;16"),
    ],
)
def test_images_that_are_none_are_told(images, error, said):
    with pytest.raises(error, match=said):
        images_of(images, 8)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (["red above blue", ""], ValueError, r"texts\[1\] has no word: ''"),
        (["red", " \t"], ValueError, r"texts\[1\] has no word"),
        (["red", None], TypeError, r"texts\[1\] must be a text, got NoneType"),
        ("red", TypeError, r"texts must be a list of texts, one for each image, got str"),
        ([], ValueError, r"texts must hold at least one text, got none"),
        (["red"], ValueError, r"texts must hold one for each of the 2 images, got 1"),
        (["red", "RED"], ValueError, r"texts must hold at least two different texts"),
    ],
)
def test_texts_that_say_nothing_are_told(given, error, said):
    with pytest.raises(error, match=said):
        small().fit(np.zeros((2, 8, 8), np.uint8), given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 10}, r"patch must divide size: 4 does not divide 10"),
        ({"heads": 3}, r"heads must divide width: 3 does not divide 32"),
        ({"kernel": "cosine"}, r"kernel must be one of"),
        ({"epochs": 0}, r"epochs must be at least 1, got 0"),
    ],
)
def test_parameters_that_cannot_be_are_told_before_any_work(options, said):
    with pytest.raises(ValueError, match=said):
        small(**options).fit(np.zeros((2, 8, 8), np.uint8), ["red", "blue"])


def test_what_no_vision_model_is_is_no_backbone():
    images = np.zeros((2, 8, 8), np.uint8)
    with pytest.raises(TypeError, match=r"backbone must be a transformers vision model, or its folder, got Linear"):
        small(backbone=torch.nn.Linear(2, 2)).fit(images, ["red", "blue"])
    with pytest.raises(FileNotFoundError, match="there is no nowhere"):
        small(backbone="nowhere").fit(images, ["red", "blue"])
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    reads = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=16))
    with pytest.raises(ValueError, match=r"backbone must take pixel_values, and BertModel takes input_ids"):
        small(backbone=reads).fit(images, ["red", "blue"])


def test_matching_tells_what_it_cannot_take(fitted):
    images = np.zeros((2, 8, 8), np.uint8)
    with pytest.raises(ValueError, match=r"texts must hold one for each of the 2 images, got 1"):
        fitted.match(images, ["red"])
    with pytest.raises(ValueError, match=r"texts\[1\] has 5 words, more than the 4 of any in fit"):
        fitted.match(images, ["red", "red left of blue green"])
    with pytest.raises(ValueError, match=r"texts\[0\] has no word"):
        fitted.match(images, ["", "red"])
    with pytest.raises(ValueError, match="not fitted yet"):
        small().match(images, ["red", "blue"])
    assert fitted.match(images, ["unheard words", "red"]).shape == (2,)


def test_matching_at_chance_is_reported():
    images = np.random.default_rng(0).integers(256, size=(8, 8, 8), dtype=np.uint8)
    model = kq.VisualParser(
        8, 4, width=8, depth=1, heads=2, parser_depth=1, epochs=5, lr=0.0, random_state=0, device="cpu"
    )
    with pytest.warns(UserWarning, match=r"after 5 epochs matching is at chance"):
        model.fit(images, ["a b", "c d"] * 4)
