"""Readings in files of every suffix: exact, small, refused where they are not what they seem."""

import json
import lzma

import pytest
import torch
from safetensors.torch import save_file

import keyquery as kq

SUFFIXES = [".json", ".json.xz"]


@pytest.fixture(scope="module")
def reading():
    torch.manual_seed(0)
    return kq.look(torch.nn.TransformerEncoderLayer(d_model=96, nhead=4), name="of 4 heads")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_loaded_reading_equals_the_saved_one(suffix, reading, tmp_path):
    path = tmp_path / f"look{suffix}"
    reading.save(path)
    loaded = kq.Reading.load(path)
    assert loaded == reading
    assert loaded.to_json() == reading.to_json()


def test_compressed_files_are_smaller(reading):
    sizes = {suffix: len(reading.content(f"look{suffix}")) for suffix in SUFFIXES}
    assert sizes[".json.xz"] < 0.6 * sizes[".json"]


def test_an_xz_file_is_that_of_the_json_text(reading, tmp_path):
    reading.save(tmp_path / "look.json.xz")
    assert json.loads(lzma.decompress((tmp_path / "look.json.xz").read_bytes())) == json.loads(reading.to_json())


def test_files_without_a_reading_are_refused(reading, tmp_path):
    save_file({"numbers": torch.zeros(3)}, tmp_path / "weights.safetensors")
    (tmp_path / "a.json.xz").write_bytes(b"not xz")
    for name in ("weights.safetensors", "a.json.xz"):
        with pytest.raises(ValueError, match=r"weights|xz"):
            kq.Reading.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        kq.Reading.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"written as \.json or \.json\.xz, not \.safetensors"):
        reading.save(tmp_path / "look.safetensors")
