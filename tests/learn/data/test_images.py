"""load_images: arrays, packed JPEGs and folders."""

import io

import numpy as np
import pytest
from PIL import Image

from keyquery.learn.data import load_images

GREY = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
COLOUR = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)
FLAT = [np.full((8, 8, 3), value, np.uint8) for value in (10, 200, 90)]  # one colour: JPEG keeps it


def jpeg(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "jpeg", quality=95)
    return np.frombuffer(out.getvalue(), np.uint8)


def packed(*parts):
    return {"jpeg": np.concatenate(parts), "offsets": np.cumsum([0, *map(len, parts)])}


def test_arrays_in_a_file(tmp_path):
    np.savez(tmp_path / "grey.npz", images=GREY)
    np.savez(tmp_path / "colour.npz", images=COLOUR, labels=np.array([1, 0], np.uint8), classes=["cat", "dog"])
    grey, colour = load_images(tmp_path / "grey.npz"), load_images(str(tmp_path / "colour.npz"))
    np.testing.assert_array_equal(grey.pixels, GREY[..., None], strict=True)
    np.testing.assert_array_equal(colour.pixels, COLOUR, strict=True)
    assert (grey.labels, grey.classes, len(grey)) == (None, (), 2)
    np.testing.assert_array_equal(colour.labels, np.array([1, 0]), strict=True)
    assert colour.classes == ("cat", "dog")
    assert repr(colour) == "Images(2 of 3 × 4 × 3, 2 classes)"


def test_packed_jpegs(tmp_path):
    np.savez(tmp_path / "a.npz", **packed(*map(jpeg, FLAT)), labels=[5, 0, 5], n_train=2)
    images = load_images(tmp_path / "a.npz")
    assert images.pixels.dtype == np.uint8
    assert np.abs(images.pixels.astype(int) - np.stack(FLAT)).max() <= 2
    assert images.labels.tolist() == [5, 0, 5]


def save(pixels, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def test_folders_are_classes(tmp_path):
    save(COLOUR[0], tmp_path / "dog" / "2.PNG")
    save(COLOUR[1], tmp_path / "dog" / "1.png")
    save(GREY[0], tmp_path / "cat" / "x.png")
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    images = load_images(tmp_path)
    assert (images.classes, images.labels.tolist()) == (("cat", "dog"), [0, 1, 1])
    grey = np.stack([GREY[0]] * 3, -1)  # one is grey, the others are not
    np.testing.assert_array_equal(images.pixels, np.stack([grey, COLOUR[1], COLOUR[0]]), strict=True)


def test_grey_stays_grey_and_alpha_and_palettes_do_not_matter(tmp_path):
    save(GREY[0], tmp_path / "grey" / "a" / "1.png")
    assert load_images(tmp_path / "grey").pixels.shape == (1, 3, 4, 1)
    alpha = np.concatenate([COLOUR[0], np.full((3, 4, 1), 7, np.uint8)], -1)
    save(alpha, tmp_path / "colour" / "a" / "1.png")
    Image.fromarray(COLOUR[0]).quantize(12).save(tmp_path / "colour" / "a" / "2.png")
    images = load_images(tmp_path / "colour")
    np.testing.assert_array_equal(images.pixels[0], COLOUR[0])
    np.testing.assert_array_equal(images.pixels[1], COLOUR[0])


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"pictures": GREY}, r"must hold images, or jpeg and offsets; it holds pictures"),
        ({"images": GREY.astype(float)}, r"images must be uint8 .*got float64 \(2, 3, 4\)"),
        ({"images": GREY[:0]}, r"not empty, got uint8 \(0, 3, 4\)"),
        ({"images": GREY, "labels": [1]}, r"labels must be integers \(2,\), got int64 \(1,\)"),
        ({"images": GREY, "labels": [0, 2], "classes": ["a", "b"]}, "labels must be from 0 to 1, got 0 to 2"),
        ({"jpeg": GREY, "offsets": [0, 1]}, r"jpeg must be uint8 \(bytes,\), got uint8 \(2, 3, 4\)"),
        ({"jpeg": GREY[0, 0], "offsets": [0]}, r"offsets must be integers \(n \+ 1,\), got int64 \(1,\)"),
        ({"jpeg": GREY[0, 0], "offsets": [0, 3, 2]}, "offsets must rise"),
        (packed(jpeg(FLAT[0]), GREY[0, 0]), r"a\.npz, image 1 is not an image that Pillow can decode"),
        (packed(jpeg(FLAT[0])[:-20], jpeg(FLAT[0])), "image 0 is not an image that Pillow can decode"),
        (packed(jpeg(FLAT[0]), jpeg(FLAT[0][:6])), "image 1 is 6 × 8, but the first image is 8 × 8"),
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
    save(np.ones((2, 2), np.uint16), tmp_path / "cat" / "deep.png")
    with pytest.raises(ValueError, match=r"deep\.png must have 8 bits per channel, got mode I;16"):
        load_images(tmp_path)
