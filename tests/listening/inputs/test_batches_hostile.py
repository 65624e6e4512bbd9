"""Texts that flood or never end: each reader refuses them, or reads them, soon and in little memory."""

import gzip
import io
import lzma
import os
import random
import sys
from pathlib import Path

import pytest
from keyquery_studies.common.events import read_cdnow, read_retail

import keyquery as kq
from keyquery.checkpoints.formats.torch_files import load_pickled
from keyquery.checkpoints.sources import read_json
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.learn.cooccurrence.tally import Tally, read_into
from keyquery.learn.data import load_images, load_table, load_ts
from keyquery.learn.data.text import encode_corpus, read_column, read_corpus, unwrap
from keyquery.listening.inputs.batches import read_lines, text_batches
from keyquery.support.arrays import read_array, read_arrays
from keyquery.support.files import read_text, text_pieces
from tests.hostile import assert_read, assert_refused

pytestmark = pytest.mark.unchecked


def tally(path):
    read_into(Tally(window=2), path, lambda items, what, total: items)


READERS = {
    "lines": read_lines,
    "corpus": lambda path: unwrap(read_corpus(path)),
    "tally": tally,
    "column": read_column,
    "table": load_table,
    "series": load_ts,
    "retail": read_retail,
    "cdnow": read_cdnow,
    "reading": kq.Reading.load,
    "config": read_json,
}


@pytest.mark.parametrize("reader", ["lines", "corpus", "tally", "column"])
@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_blanks_in_a_small_file_are_refused(pack, reader, tmp_path):
    path = tmp_path / {gzip.compress: "a.gz", lzma.compress: "a.xz"}[pack]
    path.write_bytes(pack(b" " * (20 * 2**20)))
    assert_refused(
        lambda: READERS[reader](path), "decompresses to more than the limit of 16777216 bytes", seconds=20, memory=2048
    )


def test_blanks_and_one_long_word_are_counted_in_little_memory(tmp_path):
    (tmp_path / "a.txt").write_bytes(b" " * 20_000_000 + b"\n" * 5_000_000 + b"a" * 5_000_000 + b" end")
    assert_read(lambda: tally(tmp_path / "a.txt"), growth=100)


def test_a_table_of_a_million_columns_is_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"1," * 2_000_000)
    assert_refused(lambda: load_table(tmp_path / "a.csv"), "line 1: 2000001 columns; the limit is 100000", growth=256)


# What never ends


@pytest.fixture
def endless(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return {"pipe": tmp_path / "pipe", "/dev/zero": "/dev/zero"}


FILES = {**READERS, "pieces": lambda path: list(text_pieces(path)), "array": read_array, "arrays": read_arrays}
FILES |= {"images": load_images, "torch": load_pickled, "image": kq.data.read_image, "model": kq.read}


@pytest.mark.parametrize("reader", FILES)
@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
def test_devices_and_pipes_are_refused(name, reader, endless):
    assert_refused(lambda: FILES[reader](Path(endless[name])), "is a device or a pipe", seconds=5, growth=64)


def test_a_sparse_file_is_not_read_whole(tmp_path):
    with open(tmp_path / "a.txt", "wb") as file:
        file.truncate(2**42)
    assert_refused(lambda: read_text(tmp_path / "a.txt"), "more than the limit of 1073741824", growth=64)


def test_a_text_comes_by_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\nzwei\n".encode())))
    assert read_lines("-") == ["é", "zwei"]
    monkeypatch.setattr(sys, "stdin", open("/dev/zero"))  # noqa: SIM115
    with pytest.raises(ValueError, match="standard input is longer than the limit of 67108864 bytes"):
        read_text("-")
    sys.stdin.close()


# Lines and words


def test_lines_are_those_of_splitlines(tmp_path):
    text = "".join(random.Random(0).choices("ab \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029\xa0é", k=20_000))
    (tmp_path / "a.txt").write_text(text, newline="")
    assert read_lines(tmp_path / "a.txt") == [line.strip() for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(kq.models.DECODER)


@pytest.mark.parametrize("word", ["a" * 300_000, "ab" * 150_000, "!_" * 150_000, " " * 300_000, "é" * 150_000])
def test_a_long_word_is_encoded_soon(word, tokenizer):
    assert_read(lambda: encode_corpus(word, tokenizer), growth=200)


def test_a_word_beyond_reason_is_refused(tokenizer):
    assert_refused(lambda: tokenizer.encode("a" * 2_000_000), "holds a word of 2000000 characters", growth=64)


def test_a_line_without_end_is_tokenised_in_parts(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("the sea was calm " * 1_500_000)
    lines = read_lines(tmp_path / "a.txt")
    assert_read(lambda: list(text_batches(lines, tokenizer, 32, 1000)), seconds=5, growth=64)
    (batch,) = text_batches(lines, tokenizer, 32, 64)
    (short,) = text_batches(["the sea was calm " * 100], tokenizer, 32, 64)
    assert batch["input_ids"].tolist() == short["input_ids"].tolist()
