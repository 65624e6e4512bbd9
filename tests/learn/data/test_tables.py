"""load_table, on files small enough to read."""

import gzip
import lzma

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


def test_packed_files(tmp_path):
    (tmp_path / "a.csv.xz").write_bytes(lzma.compress(PEOPLE.encode()))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(PEOPLE.encode()))
    for name in ("a.csv.xz", "a.csv.gz"):
        assert load_table(tmp_path / name)["job"].tolist() == [1, 0, -1, 1]


@pytest.mark.parametrize(
    "text",
    [
        "a,b\n1,x y\n2,z\n",
        "a;b\r\n1;x y\r\n2;z\r\n",
        "a\tb\n1 \tx y\n\n2\tz\n",
        'a,b\n1, "x y"\n2,z',
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
    assert load(tmp_path, "a,b c\n", delimiter=" ", header=False).categories == (("a,b",), ("c",))


def test_a_delimiter_within_quotes_does_not_count(tmp_path):
    table = load(tmp_path, '"a;b;c",d\n"x, y",1\n')
    assert table.columns == ("a;b;c", "d")
    assert table.categories[0] == ("x, y",)


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
    ],
)
def test_a_header_is_known_by_its_column(tmp_path, text, columns):
    assert load(tmp_path, text).columns == columns


def test_a_header_can_be_given(tmp_path):
    assert load(tmp_path, "2019,2020\n1,2\n", header=True).columns == ("2019", "2020")
    table = load(tmp_path, "a,b\nc,d\n", header=False)
    assert (table.columns, len(table)) == (("0", "1"), 2)


def test_targets_by_name_and_index(tmp_path):
    assert [load(tmp_path, PEOPLE, target=target).target for target in ("job", 1, -2, None)] == [1, 1, 1, None]


def test_missing_values_are_chosen(tmp_path):
    table = load(tmp_path, "a,b\n-999,x\n1,?\n", missing=["-999"])
    np.testing.assert_array_equal(table["a"], [np.nan, 1])
    assert table.categories[1] == ("?", "x")


def test_a_column_of_nothing_is_numeric(tmp_path):
    table = load(tmp_path, "a,b\n1,\n2,?\n")
    assert table.kinds == ("numeric", "numeric")
    assert np.isnan(table["b"]).all()


def test_a_code_with_an_underscore_is_no_number(tmp_path):
    assert load(tmp_path, "a\n1_2\n12\n").categories == (("12", "1_2"),)


def test_other_encodings_can_be_given(tmp_path):
    (tmp_path / "a.csv").write_bytes("name,price\ncafé,2\n".encode("latin-1"))
    assert load_table(tmp_path / "a.csv", encoding="latin-1").categories[0] == ("café",)
    with pytest.raises(ValueError, match="not UTF-8 text: byte 0xe9 at 14"):
        load_table(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("text", "options", "complaint"),
    [
        ("", {}, r"a\.csv is empty"),
        (" \n\n", {}, "is empty"),
        ("a,b\n", {}, "holds a header and no rows; if it has no header, pass header=False"),
        ("a,b\n1,2\n\n3\n", {}, "line 4: expected 2 columns, as in the first row, got 1"),
        ('a,b\n"1\n1",2\n3,4,5\n', {}, "line 4: expected 2 columns, as in the first row, got 3"),
        ("1 2\n3 4 5\n", {}, "line 2: expected 2 columns, as in the first row, got 3"),
        ('a,b\n"x"y,2\n', {}, "line 2: ',' expected after '\"'"),
        ("a,b,a\n1,2,3\n", {}, "column names must be unique, got 'a' more than once in the header"),
        ("age,b\n1,2\n", {"target": "agee"}, "target must be one of 'age', 'b', got 'agee'; did you mean 'age'"),
        ("a,b\n1,2\n", {"target": 2}, "target must be between -2 and 1, got 2"),
        ("a,b\n1,2\n", {"header": "yes"}, "header must be True, False or 'auto', got 'yes'"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, text, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path, text, **options)


def test_one_text_is_no_list_of_missing_values(tmp_path):
    with pytest.raises(TypeError, match="missing must be a list of texts, got a single text 'NA'"):
        load(tmp_path, "a\n1\n", missing="NA")


def test_a_compressed_file_of_few_bytes_holds_no_millions_of_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CELLS", 4000)
    file, row = tmp_path / "a.csv.gz", b"ab,cd,ef,gh\n"
    file.write_bytes(gzip.compress(row * 800))
    assert len(load_table(file, header=False)) == 800
    file.write_bytes(gzip.compress(row * 1200))
    with pytest.raises(ValueError, match=r"decompresses to more than the limit of 4... cells and rows: decompress it"):
        load_table(file)
    (tmp_path / "a.csv").write_bytes(row * 1200)
    assert len(load_table(tmp_path / "a.csv", header=False)) == 1200


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_any_line_end(end, tmp_path):
    (tmp_path / "a.csv").write_bytes(f'x,y{end}1,"a{end}b"{end}{end}2,c'.encode())
    table = load_table(tmp_path / "a.csv")
    assert table["x"].tolist() == [1, 2]
    assert table.categories[1] == (f"a{end}b", "c")


def test_columns_with_long_names_are_named_in_short(tmp_path):
    (tmp_path / "a.tsv").write_text("x" * 100_000 + "\t" + "y" * 100_000 + "\n1\t2\n")
    for read in (lambda path: load_table(path, target="z"), read_column):
        with pytest.raises(ValueError, match="must be one of 'xxx") as refusal:
            read(tmp_path / "a.tsv")
        assert len(str(refusal.value)) < 3000
