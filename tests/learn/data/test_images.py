"""load_images: arrays, folders, and files that flood or claim more than they hold."""

import io
import struct
import zipfile

import numpy as np
import pytest
from PIL import Image

from keyquery.learn.data import load_images
from keyquery.support.arrays import read_array, read_arrays
from tests.hostile import assert_refused

GREY = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
COLOUR = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)


def save(pixels, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def test_arrays_in_a_file(tmp_path):
    np.savez(tmp_path / "grey.npz", images=GREY, n_train=2)
    np.savez(tmp_path / "colour.npz", images=COLOUR, labels=np.array([1, 0], np.uint8), classes=["cat", "dog"])
    grey, colour = load_images(tmp_path / "grey.npz"), load_images(str(tmp_path / "colour.npz"))
    np.testing.assert_array_equal(grey.pixels, GREY[..., None], strict=True)
    np.testing.assert_array_equal(colour.pixels, COLOUR, strict=True)
    assert (grey.labels, grey.classes, len(grey)) == (None, (), 2)
    np.testing.assert_array_equal(colour.labels, np.array([1, 0]), strict=True)
    assert colour.classes == ("cat", "dog")
    assert repr(colour) == "Images(2 of 3 × 4 × 3, 2 classes)"


def test_folders_are_classes(tmp_path):
    save(COLOUR[0], tmp_path / "dog" / "2.PNG")
    save(COLOUR[1], tmp_path / "dog" / "1.png")
    save(GREY[0], tmp_path / "cat" / "x.png")
    save(np.full((3, 4, 3), 200, np.uint8), tmp_path / "cat" / "y.jpg")  # one colour: JPEG keeps it
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    images = load_images(tmp_path)
    assert (images.classes, images.labels.tolist()) == (("cat", "dog"), [0, 0, 1, 1])
    grey = np.stack([GREY[0]] * 3, -1)  # one is grey, the others are not
    np.testing.assert_array_equal(images.pixels[[0, 2, 3]], np.stack([grey, COLOUR[1], COLOUR[0]]), strict=True)
    assert np.abs(images.pixels[1].astype(int) - 200).max() <= 2


def test_grey_stays_grey_and_alpha_and_palettes_do_not_matter(tmp_path):
    save(GREY[0], tmp_path / "grey" / "a" / "1.png")
    assert load_images(tmp_path / "grey").pixels.shape == (1, 3, 4, 1)
    alpha = np.concatenate([COLOUR[0], np.full((3, 4, 1), 7, np.uint8)], -1)
    save(alpha, tmp_path / "colour" / "a" / "1.png")
    Image.fromarray(COLOUR[0]).quantize(12).save(tmp_path / "colour" / "a" / "2.png")
    images = load_images(tmp_path / "colour")
    np.testing.assert_array_equal(images.pixels, np.stack([COLOUR[0]] * 2))


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"pictures": GREY}, "must hold images; it holds pictures"),
        ({"images": GREY.astype(float)}, r"images must be uint8 .*got float64 \(2, 3, 4\)"),
        ({"images": GREY[:0]}, r"not empty, got uint8 \(0, 3, 4\)"),
        ({"images": GREY, "labels": [1]}, r"labels must be integers \(2,\), got int64 \(1,\)"),
        ({"images": GREY, "labels": [0, 2], "classes": ["a", "b"]}, "labels must be from 0 to 1, got 0 to 2"),
        ({"images": GREY, "labels": [0, -1], "classes": ["a", "b"]}, "labels must be from 0 to 1, got -1 to 0"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path, arrays, complaint):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=complaint):
        load_images(tmp_path / "a.npz")


def test_what_is_wrong_with_a_path_is_told(tmp_path):
    (tmp_path / "a.npz").write_text("junk")
    with pytest.raises(ValueError, match=r"a\.npz must be an \.npz file or a folder"):
        load_images(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="must hold one subfolder per class, and holds none"):
        load_images(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match=r"cat holds no image; expected \.png, \.jpg, \.jpeg"):
        load_images(tmp_path)
    for name, pixels, complaint in (
        ("1.png", np.ones((2, 2), np.uint8), None),
        ("2.png", np.ones((3, 2), np.uint8), r"2\.png is 3 × 2, but the first image is 2 × 2"),
        ("2.png", np.ones((2, 2), np.uint16), r"2\.png must have 8 bits per channel, got mode I;16"),
        ("1.png", None, r"1\.png is not an image that Pillow can decode"),
    ):
        if pixels is None:
            (tmp_path / "cat" / name).write_bytes(b"\x89PNG junk")
        else:
            save(pixels, tmp_path / "cat" / name)
        if complaint is not None:
            with pytest.raises(ValueError, match=complaint):
                load_images(tmp_path)


# Hostile files


@pytest.mark.unchecked
def test_black_images_share_one_budget(tmp_path):
    out = io.BytesIO()
    Image.new("RGB", (4096, 4096)).save(out, "png")
    (tmp_path / "cat").mkdir()
    for i in range(20):
        (tmp_path / "cat" / f"{i}.png").write_bytes(out.getvalue())
    assert_refused(lambda: load_images(tmp_path), "the decoded images exceed the limit", growth=300)


@pytest.mark.unchecked
def test_a_jpeg_of_many_scans_is_refused(tmp_path):
    out = io.BytesIO()
    Image.new("L", (4096, 4096)).save(out, "jpeg", progressive=True)
    data = out.getvalue()
    start = data.rindex(b"\xff\xda")
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.jpg").write_bytes(data[:start] + data[start:-2] * 1000 + data[-2:])
    assert_refused(lambda: load_images(tmp_path), "more than 500 scans", growth=100)


@pytest.mark.unchecked
def test_classes_without_end_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", images=np.zeros((1, 8, 8), np.uint8), classes=np.zeros(10**8, np.uint8))
    assert_refused(lambda: load_images(tmp_path / "a.npz"), "classes must be at most 100000 names", growth=300)


def claiming(dtype, shape):
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 64


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("dtype", "shape", "words"),
    [
        ("<f8", (2**62, 2**62), "bytes hold"),
        ("<U0", (2**60,), "bytes hold"),
        ("|O", (1,), "could execute code"),
        ([("a", "<f8")], (1,), "only numbers and strings are read"),
        ("<f8", (-1,), "is not a readable"),
    ],
)
def test_arrays_hold_what_they_claim(dtype, shape, words, tmp_path):
    data = claiming(dtype, shape)
    (tmp_path / "a.npy").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("classes.npy", data)
        archive.writestr("images.npy", claiming("|u1", (1, 8, 8)))
    assert_refused(lambda: read_array(tmp_path / "a.npy"), words, growth=64)
    assert_refused(lambda: read_arrays(tmp_path / "a.npz"), words, growth=64)
    assert_refused(lambda: load_images(tmp_path / "a.npz"), words, growth=64)
