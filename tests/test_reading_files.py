"""Readings in files of every suffix: exact, small, refused where they are not what they seem."""

import json
import lzma

import pytest
import torch
from safetensors.torch import save_file

import keyquery as kq

SUFFIXES = [".json", ".json.xz", ".safetensors", ".parquet"]


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


def test_compressed_and_binary_files_are_smaller(reading):
    sizes = {suffix: len(reading.content(f"look{suffix}")) for suffix in SUFFIXES[:3]}
    assert sizes[".json.xz"] < 0.6 * sizes[".json"]
    assert sizes[".safetensors"] < 0.6 * sizes[".json"]


def test_other_programs_read_the_rows_of_a_parquet_file(reading, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    reading.save(tmp_path / "look.parquet")
    table = parquet.read_table(tmp_path / "look.parquet").to_pylist()
    assert [row["raw_symmetry"] for row in table] == [head["raw"]["symmetry"] for head in reading.heads]


def test_an_xz_file_is_that_of_the_json_text(reading, tmp_path):
    reading.save(tmp_path / "look.json.xz")
    assert json.loads(lzma.decompress((tmp_path / "look.json.xz").read_bytes())) == json.loads(reading.to_json())


@pytest.mark.parametrize(
    ("skeleton", "numbers"),
    [
        ('{"schema": 2, "kind": "reading", "provenance": {"a": {"$numbers": 9}}}', 8),  # more than there are
        ('{"schema": 2, "kind": "reading", "provenance": {"a": {"$numbers": -1}}}', 8),
        ('{"schema": 2, "kind": "reading", "provenance": {"a": {"$numbers": 8.0}}}', 8),
        ('{"schema": 2, "kind": "reading", "provenance": {}}', 8),  # some belong nowhere
        ('{"schema": 2, "kind": "reading", "provenance": {}', 0),
    ],
)
def test_a_file_whose_numbers_do_not_fit_is_refused(skeleton, numbers, tmp_path):
    save_file({"numbers": torch.zeros(numbers, dtype=torch.float64)}, tmp_path / "a.safetensors", {"reading": skeleton})
    with pytest.raises(ValueError, match="not a reading"):
        kq.Reading.load(tmp_path / "a.safetensors")


def test_files_without_a_reading_are_refused(tmp_path):
    save_file({"numbers": torch.zeros(3)}, tmp_path / "weights.safetensors")
    (tmp_path / "text.parquet").write_bytes(b"not Parquet")
    for name in ("weights.safetensors", "text.parquet"):
        with pytest.raises(ValueError, match="reading"):
            kq.Reading.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        kq.Reading.load(tmp_path / "none.safetensors")
