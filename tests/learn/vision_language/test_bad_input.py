"""Images of odd sizes and modes, and what a VisualParser says to what it cannot take."""

from functools import partial

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.learn.inputs.images import images_of
from tests.learn.vision_language.test_parser import fields, small, texts

Image = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(256, size=(9, 13, 3), dtype=np.uint8)
DARK = np.zeros((2, 8, 8), np.uint8)


def test_grey_palette_alpha_and_paths_are_the_images_they_show(tmp_path):
    colour = Image.fromarray(PIXELS)
    grey, palette = colour.convert("L"), colour.convert("P")
    clear = colour.convert("RGBA")
    clear.putalpha(40)
    colour.save(tmp_path / "a.png")
    palette.save(tmp_path / "b.png")
    flat = np.asarray(grey)
    for shown, same in (
        (PIXELS, (colour, clear, np.asarray(clear), PIXELS / 255, torch.from_numpy(PIXELS), tmp_path / "a.png")),
        (np.asarray(palette.convert("RGB")), (palette, str(tmp_path / "b.png"))),
        (np.repeat(flat[..., None], 3, -1), (grey, flat, flat[..., None], np.asarray(grey.convert("LA")))),
    ):
        for image in same:
            assert torch.equal(images_of([image], 8), images_of([shown], 8))
    bits = Image.new("1", (5, 3), 1)
    assert (images_of([bits], 4) == 255).all()


def test_images_of_any_size_are_brought_to_one():
    wide, single = np.full((3, 40), 200, np.uint8), np.full((1, 1, 3), 7, np.uint8)
    sized = images_of([wide, single, PIXELS], 16)
    assert sized.shape == (3, 3, 16, 16)
    assert (sized[0] == 200).all()
    assert (sized[1] == 7).all()
    halved = images_of(np.arange(36, dtype=np.uint8).reshape(1, 6, 6) * 7, 2).float()
    assert halved[0, 0, 0, 0] < halved[0, 0, 0, 1] < halved[0, 0, 1, 0]  # nothing is turned
    assert torch.equal(images_of(PIXELS[None], 9), images_of([PIXELS], 9))
    exact = images_of(PIXELS[:9, :9][None], 9)
    assert torch.equal(exact[0].permute(1, 2, 0), torch.from_numpy(PIXELS[:9, :9].copy()))
    assert torch.equal(images_of(kq.data.Images(PIXELS[None], None), 8), images_of(PIXELS[None], 8))


def of(images):
    return partial(images_of, images, 8)


def fit(texts, images=DARK, **options):
    return partial(small(**options).fit, images, texts)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (of(PIXELS), ValueError, r"images must be \(n, h, w\).*got \(9, 13, 3\): pass one image as \[image\]"),
        (of(np.zeros((2, 8, 8), np.int32)), ValueError, r"images must be uint8, or floats from 0 to 1, got int32"),
        (of(np.full((2, 8, 8), 3.0)), ValueError, r"images: floats must be from 0 to 1, got 3 to 3"),
        (of(np.full((2, 8, 8), np.nan)), ValueError, r"images: floats must be from 0 to 1"),
        (of(np.zeros((2, 3, 8, 8), np.uint8)), ValueError, r"channels last, 1 \(grey\).*got shape \(2, 3, 8, 8\)"),
        (of(np.zeros((0, 8, 8), np.uint8)), ValueError, r"images must not be empty"),
        (of([]), ValueError, r"images must hold at least one image, got none"),
        (of("a.png"), TypeError, r"images must be an array or a list of images, got str: pass one image as \[image\]"),
        (of([np.zeros(8, np.uint8)]), ValueError, r"images\[0\] must be \(h, w\) or \(h, w, c\), a path"),
        (of(["there is none.png"]), FileNotFoundError, r"there is no image there is none.png"),
        (of([Image.new("I;16", (4, 4))]), ValueError, r"images\[0\] must have 8 bits per channel, got mode I;16"),
        (fit(["red above blue", ""]), ValueError, r"texts\[1\] has no word: ''"),
        (fit(["red", None]), TypeError, r"texts\[1\] must be a text, got NoneType"),
        (fit("red"), TypeError, r"texts must be a list of texts, one for each image, got str"),
        (fit([]), ValueError, r"texts must hold at least one text, got none"),
        (fit(["red"]), ValueError, r"texts must hold one for each of the 2 images, got 1"),
        (fit(["red", "RED"]), ValueError, r"texts must hold at least two different texts"),
        (fit(["red", "blue"], size=10), ValueError, r"patch must divide size: 4 does not divide 10"),
        (fit(["red", "blue"], heads=3), ValueError, r"heads must divide width: 3 does not divide 32"),
        (fit(["red", "blue"], kernel="cosine"), ValueError, r"kernel must be one of"),
        (fit(["red", "blue"], epochs=0), ValueError, r"epochs must be at least 1, got 0"),
        (fit(["red", "blue"], backbone=torch.nn.Linear(2, 2)), TypeError, r"backbone must be .* vision model.*Linear"),
        (fit(["red", "blue"], backbone="nowhere"), FileNotFoundError, "there is no nowhere"),
        (partial(small().match, DARK, ["red", "blue"]), ValueError, "not fitted yet"),
    ],
)
def test_what_cannot_be_used_is_told_before_any_work(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_a_text_model_is_no_backbone():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    reads = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=16))
    with pytest.raises(ValueError, match=r"backbone must take pixel_values, and BertModel takes input_ids"):
        small(backbone=reads).fit(DARK, ["red", "blue"])


def test_matching_tells_what_it_cannot_take():
    images, said = fields(32, 0)
    fitted = small(epochs=1).fit(images, texts(said))
    for captions, message in (
        (["red"], r"texts must hold one for each of the 2 images, got 1"),
        (["red", "red left of blue green"], r"texts\[1\] has 5 words, the longest of fit has 4"),
        (["", "red"], r"texts\[0\] has no word"),
    ):
        with pytest.raises(ValueError, match=message):
            fitted.match(DARK, captions)
    assert fitted.match(DARK, ["unheard words", "red"]).shape == (2,)


def test_matching_at_chance_is_reported():
    images = RNG.integers(256, size=(8, 8, 8), dtype=np.uint8)
    with pytest.warns(UserWarning, match=r"after 5 epochs matching is at chance"):
        small(width=8, depth=1, epochs=5, lr=0.0).fit(images, ["a b", "c d"] * 4)
