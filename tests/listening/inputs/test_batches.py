"""Text of files, packed or not."""

import gzip
import lzma

import pytest

from keyquery.learn.data.numbers import to_number
from keyquery.support.files import read_text

TEXT = "Ångström\nline two\n"


def test_packed_files_are_unpacked(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(TEXT.encode()))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / "marked.txt").write_bytes(TEXT.encode("utf-8-sig"))
    for name in ("a.txt", "a.txt.xz", "a.txt.gz", "marked.txt"):
        assert read_text(tmp_path / name) == TEXT


@pytest.mark.parametrize(("suffix", "pack"), [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_a_broken_package_is_told(tmp_path, suffix, pack):
    whole = pack(TEXT.encode() * 50)
    for name, data in (("junk", b"not packed at all"), ("half", whole[: len(whole) // 2])):
        (tmp_path / (name + suffix)).write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name}\{suffix} is not a valid \{suffix} file"):
            read_text(tmp_path / (name + suffix))


def test_the_encoding_is_given_or_told(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("café".encode("latin-1"))
    assert read_text(file, "latin-1") == "café"
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text: byte 0xe9 at 3"):
        read_text(file)


def test_an_underscore_is_no_part_of_a_number():
    assert to_number("1e3") == 1000
    with pytest.raises(ValueError, match="'1_0' is not a number"):
        to_number("1_0")
