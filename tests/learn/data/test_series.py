"""load_ts, on files small enough to read."""

import lzma

import numpy as np
import pytest

from keyquery.learn.data import load_ts, series

nan = np.nan

WAVES = """# A comment
#
@problemName Waves
@timeStamps false
@missing true
@univariate false
@dimensions 2
@equalLength false
@classLabel true up down

@data
1,2,3:4,5,6:up
# between rows
-1.5,?,NaN : 2e-1,7 :down

8:9:up
"""


def load(folder, text, name="a.ts"):
    (folder / name).write_text(text)
    return load_ts(folder / name)


def assert_same(given, expected):
    np.testing.assert_array_equal(given, np.array(expected, dtype=np.float64), strict=True)


def test_a_file_is_read_as_it_stands(tmp_path):
    series = load(tmp_path, WAVES)
    assert len(series) == 3
    assert_same(series.values[0], [[1, 4], [2, 5], [3, 6]])
    assert_same(series.values[1], [[-1.5, 0.2], [nan, 7], [nan, nan]])  # missing, and filled up to the longest
    assert_same(series.values[2], [[8, 9]])
    assert series.labels.tolist() == ["up", "down", "up"]
    assert series.classes == ("up", "down")
    assert repr(series) == "Series(3 series, length 1 … 3, dims 2, 2 classes)"


def test_case_line_ends_and_packing_do_not_matter(tmp_path):
    shouted = "\n".join(line.upper() if line.startswith("@") else line for line in WAVES.split("\n"))
    shouted = shouted.replace("UP DOWN", "up down").replace("\n", "\r\n")
    (tmp_path / "a.ts.xz").write_bytes(lzma.compress(shouted.encode()))
    plain, packed = load(tmp_path, WAVES), load_ts(tmp_path / "a.ts.xz")
    for one, other in zip(plain.values, packed.values, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (packed.labels.tolist(), packed.classes) == (plain.labels.tolist(), plain.classes)


def test_what_the_header_does_not_say_is_seen_in_the_rows(tmp_path):
    series = load(tmp_path, "@classLabel false\n@data\n1,2::3\n")
    assert_same(series.values[0], [[1, nan, 3], [2, nan, nan]])
    assert (series.labels, series.classes) == (None, ())
    assert load(tmp_path, "@classLabel true\n@data\n1:b\n2:a\n3:b\n").classes == ("a", "b")


HEAD = "@dimensions 2\n@classLabel true a b\n@data\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1,2:3,4:a\n", r"a\.ts is not a \.ts file: it has no @data line"),
        ("@timeStamps true\n@data\n(0,1):a\n", "has time stamps .*not supported"),
        ("@targetlabel true\n@data\n1:0.5\n", "has numeric targets .*not supported"),
        ("@timeStamps maybe\n@data\n1:a\n", "@timestamps must be true or false, got 'maybe'"),
        ("@dimensions two\n@data\n1:a\n", "@dimensions must be an integer ≥ 1, got 'two'"),
        ("1,2\n@data\n", "line 1: lines before @data must begin with @, got '1,2'"),
        (HEAD, "holds no series: nothing follows @data"),
        (HEAD + "1:2:a\n# x\n1:2:3:b\n", "line 6: expected 2 dimensions and a label, separated by colons, got 3"),
        ("@data\n1:2\n1:2:3\n", "line 3: expected 2 dimensions, separated by colons, got 3"),
        (HEAD + "1,2:3,x4:a\n", "line 4: 'x4' is not a number"),
        (HEAD + "1_0:3:a\n", "line 4: '1_0' is not a number"),
        (HEAD + "1:2:c\n", "line 4: label 'c' is not one of the header's classes: a, b"),
        (HEAD + "::a\n", "line 4: a series without values"),
        (HEAD + "x" * 99_999 + ":1:a\n", "line 4: 'x{50,60} is not a number$"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path, text, complaint):
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path, text)


def test_a_compressed_file_of_few_bytes_holds_no_millions_of_series(tmp_path, monkeypatch):
    monkeypatch.setattr(series, "SERIES", 1000)
    (tmp_path / "a.ts.xz").write_bytes(lzma.compress(("@data\n" + "1:2\n" * 1000).encode()))
    assert len(load_ts(tmp_path / "a.ts.xz")) == 1000
    (tmp_path / "a.ts.xz").write_bytes(lzma.compress(("@data\n" + "1:2\n" * 2000).encode()))
    with pytest.raises(ValueError, match=r"decompresses to more than the limit of 1... series"):
        load_ts(tmp_path / "a.ts.xz")
