"""Readings keep their numbers and provenance through JSON, frames and pages."""

import json
import lzma
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.reading import Reading


@dataclass(frozen=True, kw_only=True)
class Temperature(Reading, kind="temperature"):
    units: ClassVar[Mapping[str, str]] = {"degrees": "°C"}
    degrees: float
    curve: Any = ()


@pytest.fixture
def reading():
    return Temperature(degrees=21.5, curve=torch.tensor([1.0, 2.0]), provenance={"model": "<b>oven</b>"})


def test_json_names_kind_schema_units_and_provenance(reading):
    assert json.loads(reading.to_json()) == {
        "schema": 2,
        "kind": "temperature",
        "units": {"degrees": "°C"},
        "provenance": {"model": "<b>oven</b>"},
        "degrees": 21.5,
        "curve": [1.0, 2.0],
    }


def test_load_finds_the_class_by_kind(reading, tmp_path):
    path = tmp_path / "reading.json"
    text = reading.to_json(path)
    for source in (path, str(path), text):
        loaded = Reading.load(source)
        assert type(loaded) is Temperature
        assert loaded.degrees == 21.5
        assert loaded.to_json() == text


@pytest.mark.parametrize("suffix", [".json", ".json.xz"])
def test_a_file_holds_the_json_text(suffix, reading, tmp_path):
    path = tmp_path / f"reading{suffix}"
    reading.save(path)
    data = path.read_bytes()
    assert json.loads(lzma.decompress(data) if suffix == ".json.xz" else data) == json.loads(reading.to_json())
    assert Reading.load(path) == reading


def test_files_without_a_reading_are_refused(reading, tmp_path):
    (tmp_path / "a.json.xz").write_bytes(b"not xz")
    with pytest.raises(ValueError, match=r"is not a valid \.xz file"):
        Reading.load(tmp_path / "a.json.xz")
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        Reading.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"written as \.json or \.json\.xz, not \.safetensors"):
        reading.save(tmp_path / "look.safetensors")


def test_load_finds_an_instrument_that_was_not_imported(tmp_path):
    path = tmp_path / "look.json"
    look = kq.look(torch.nn.MultiheadAttention(8, 2))
    look.to_json(path)
    code = f"import keyquery; print(type(keyquery.Reading.load({str(path)!r})).__name__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "Look\n"
    assert Reading.load(path) == look


def test_one_kind_has_one_class():
    with pytest.raises(TypeError, match="the kind 'temperature' belongs to tests"):

        class Fever(Reading, kind="temperature"):
            pass


def test_numpy_and_tuples_become_plain():
    reading = Temperature(degrees=np.float32(2.0), curve=(np.int64(1), torch.tensor(2.0), np.array([3.0])))
    assert (reading.degrees, reading.curve) == (2.0, [1, 2.0, [3.0]])
    with pytest.raises(AttributeError):  # it is frozen
        reading.degrees = 30.0
    assert Reading.load(reading.to_json()) == reading


def test_frame_holds_the_scalars(reading):
    frame = reading.to_frame()
    assert list(frame.columns) == ["kind", "degrees"]
    assert frame.degrees[0] == 21.5


def test_html_shows_texts_as_texts():
    @dataclass(frozen=True, kw_only=True)
    class Token(Reading, kind="token"):
        text: str

    page = Token(text="<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<caption>token" in page


def test_nan_is_refused():
    with pytest.raises(ValueError, match="degrees is nan, which JSON cannot represent"):
        Temperature(degrees=float("nan")).to_json()
    with pytest.raises(ValueError, match=r"curve\[0\]\.a is <object"):
        Temperature(degrees=1.0, curve=[{"a": object()}]).to_json()


def test_a_kind_without_a_picture_says_so(reading):
    with pytest.raises(ValueError, match="'temperature' has no figure"):
        reading.plot()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a reading: invalid JSON at line 1, column 2"),
        ("[1, 2]", "not a reading: expected a JSON object with `kind` and `schema`"),
        ('{"schema": 1, "kind": [1]}', "not a reading: expected a JSON object with `kind` and `schema`"),
        ('{"a": 1}', "not a reading: expected a JSON object with `kind` and `schema`"),
        ('{"schema": 1, "kind": "sonnet"}', "unknown kind of reading 'sonnet'"),
        ('{"schema": 9, "kind": "temperature", "degrees": 1}', "has schema 9; this version reads 1"),
        ('{"schema": 1, "kind": "temperature"}', "not a reading of kind 'temperature': .*degrees"),
        ('{"schema": 1, "kind": "temperature", "degrees": 1, "spin": 2}', "not a reading of kind .*spin"),
    ],
)
def test_what_is_no_reading_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        Reading.load(text)
