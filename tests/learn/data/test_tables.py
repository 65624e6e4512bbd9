"""load_table, on files small enough to read."""

import gzip

import numpy as np
import pytest

from keyquery.learn.data import load_table, tables
from keyquery.learn.data.text import read_column

PEOPLE = """age, job, income
39, clerk, 1e3
?, baker,
50, NA, -2.5
28, clerk, nan
"""


def load(folder, text, name="a.csv", **options):
    (folder / name).write_text(text)
    return load_table(folder / name, **options)


def test_numbers_and_categories_are_told_apart(tmp_path):
    table = load(tmp_path, PEOPLE, target="income")
    assert len(table) == 4
    assert table.columns == ("age", "job", "income")
    assert table.kinds == ("numeric", "categorical", "numeric")
    assert table.categories == ((), ("baker", "clerk"), ())
    assert table.target == 2
    np.testing.assert_array_equal(table["age"], np.array([39, np.nan, 50, 28]), strict=True)
    np.testing.assert_array_equal(table["job"], np.array([1, 0, -1, 1]), strict=True)
    np.testing.assert_array_equal(table[-1], np.array([1000, np.nan, -2.5, np.nan]), strict=True)
    assert repr(table) == "Table(4 rows, 2 numeric and 1 categorical columns, target 'income')"


@pytest.mark.parametrize(
    "text",
    [
        "a,b\n1,x y\n2,z\n",
        "a;b\r\n1;x y\r\n2;z\r\n",
        "a\tb\n1 \tx y\n\n2\tz\n",
        'a,b\r1, "x y"\r2,z',
        '"a","b"\n"1","x y"\n\n"2","z"\n',
        "\ufeffa,b\n1,x y\n2,z\n",
    ],
)
def test_delimiters_quotes_and_line_ends_are_found(tmp_path, text):
    (tmp_path / "a.csv").write_bytes(text.encode())
    table = load_table(tmp_path / "a.csv")
    assert table.columns == ("a", "b")
    assert table["a"].tolist() == [1, 2]
    assert table.categories[1] == ("x y", "z")


def test_blanks_divide_where_nothing_else_does(tmp_path):
    table = load(tmp_path, "  0.5  18.00   x\n\n 10\t2  y  \n")
    assert [values.tolist() for values in table.values] == [[0.5, 10], [18, 2], [0, 1]]


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("a,b\n1,2\n3,4\n", ("a", "b")),
        ("1,2\n3,4\n", ("0", "1")),
        ("x,1\ny,2\n", ("0", "1")),  # a number stands in no header
        ("?,x\n3,x\n", ("0", "1")),  # x comes again: a row
        ("p,x\ne,x\np,y\n", ("0", "1")),
        ("kind,shape\np,x\np,y\n", ("kind", "shape")),  # texts only, and none comes again
        ("other,n\nother,1\nsome,2\n", ("other", "n")),  # it comes again, but above a column of numbers
        (",a\n0,5\n1,6\n", ("0", "a")),  # an index without a name, as pandas writes it
        ('"a;b;c",d\n"x, y",1\n', ("a;b;c", "d")),  # delimiters within quotes do not count
        ("a,b\n1_2,\n12,?\n", ("a", "b")),  # a code with an underscore is no number; a column of nothing is one
    ],
)
def test_a_header_is_known_by_its_column(tmp_path, text, columns):
    assert load(tmp_path, text).columns == columns


def test_targets_by_name_and_index(tmp_path):
    assert [load(tmp_path, PEOPLE, target=target).target for target in ("job", 1, -2, None)] == [1, 1, 1, None]


@pytest.mark.parametrize(
    ("text", "target", "complaint"),
    [
        (" \n\n", None, r"a\.csv is empty"),
        ("a,b\n", None, "holds a header and no rows"),
        ("a,b\n1,2\n\n3\n", None, "line 4: expected 2 columns, as in the first row, got 1"),
        ('a,b\n"1\n1",2\n3,4,5\n', None, "line 4: expected 2 columns, as in the first row, got 3"),
        ("1 2\n3 4 5\n", None, "line 2: expected 2 columns, as in the first row, got 3"),
        ('a,b\n"x"y,2\n', None, "line 2: ',' expected after '\"'"),
        ("a,b,a\n1,2,3\n", None, "column names must be unique, got 'a' more than once in the header"),
        ("age,b\n1,2\n", "agee", "target must be one of 'age', 'b', got 'agee'; did you mean 'age'"),
        ("a,b\n1,2\n", 2, "target must be between -2 and 1, got 2"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, text, target, complaint):
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path, text, target=target)


def test_a_compressed_file_of_few_bytes_holds_no_millions_of_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CELLS", 4000)
    file, row = tmp_path / "a.csv.gz", b"ab,cd,ef,gh\n"
    file.write_bytes(gzip.compress(row * 800))
    assert len(load_table(file)) == 800
    file.write_bytes(gzip.compress(row * 1200))
    with pytest.raises(ValueError, match=r"decompresses to more than the limit of 4... cells and rows: decompress it"):
        load_table(file)
    (tmp_path / "a.csv").write_bytes(row * 1200)
    assert len(load_table(tmp_path / "a.csv")) == 1200


def test_columns_with_long_names_are_named_in_short(tmp_path):
    (tmp_path / "a.tsv").write_text("x" * 100_000 + "\t" + "y" * 100_000 + "\n1\t2\n")
    for read in (lambda path: load_table(path, target="z"), read_column):
        with pytest.raises(ValueError, match="must be one of 'xxx") as refusal:
            read(tmp_path / "a.tsv")
        assert len(str(refusal.value)) < 3000
