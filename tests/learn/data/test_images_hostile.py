"""Folders of images that flood, and arrays that claim more than they hold."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from keyquery.learn.data import load_images
from keyquery.support.arrays import read_array, read_arrays
from tests.hostile import assert_refused
from tests.learn.data.test_images import packed

pytestmark = pytest.mark.unchecked


def black(side):
    out = io.BytesIO()
    Image.new("RGB", (side, side)).save(out, "png")
    return out.getvalue()


@pytest.fixture(scope="module")
def flood():
    return black(4096)


def test_black_images_share_one_budget(flood, tmp_path):
    (tmp_path / "cat").mkdir()
    for i in range(20):
        (tmp_path / "cat" / f"{i}.png").write_bytes(flood)
    assert_refused(lambda: load_images(tmp_path), "the decoded images exceed the limit", growth=300)
    np.savez(tmp_path / "a.npz", **packed(*[np.frombuffer(flood, np.uint8)] * 20))
    assert_refused(lambda: load_images(tmp_path / "a.npz"), "the decoded images exceed the limit", growth=300)


def test_a_jpeg_of_many_scans_is_refused(tmp_path):
    out = io.BytesIO()
    Image.new("L", (4096, 4096)).save(out, "jpeg", progressive=True)
    data = out.getvalue()
    start = data.rindex(b"\xff\xda")
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.jpg").write_bytes(data[:start] + data[start:-2] * 1000 + data[-2:])
    assert_refused(lambda: load_images(tmp_path), "more than 500 scans", growth=100)


def test_classes_without_end_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", images=np.zeros((1, 8, 8), np.uint8), classes=np.zeros(10**8, np.uint8))
    assert_refused(lambda: load_images(tmp_path / "a.npz"), "classes must be at most 100000 names", growth=300)
    np.savez_compressed(tmp_path / "a.npz", jpeg=np.zeros(8, np.uint8), offsets=np.zeros(2**23, np.int64))
    assert_refused(lambda: load_images(tmp_path / "a.npz"), "image 0 is not an image", growth=300)


def claiming(dtype, shape):
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 64


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
    import zipfile

    data = claiming(dtype, shape)
    (tmp_path / "a.npy").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("classes.npy", data)
        archive.writestr("images.npy", claiming("|u1", (1, 8, 8)))
    assert_refused(lambda: read_array(tmp_path / "a.npy"), words, growth=64)
    assert_refused(lambda: read_arrays(tmp_path / "a.npz"), words, growth=64)
    assert_refused(lambda: load_images(tmp_path / "a.npz"), words, growth=64)
