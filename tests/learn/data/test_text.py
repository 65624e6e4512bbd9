"""Corpora, tokenizers and windows."""

import lzma

import pytest
import torch

from keyquery.learn.data import encode_corpus, read_column, read_corpus, train_tokenizer, unwrap, windows

TEXT = "The cat sat on the mat.\nThe dog sat on the cat.\n\nThe end of the tale.\n" * 20


def test_a_column_of_texts_may_be_packed_and_hold_quotes(tmp_path):
    rows = ["label\ttext", '1\t"Fine", he said', "0\tit's too long"]
    (tmp_path / "a.tsv.xz").write_bytes(lzma.compress("\r\n".join(rows).encode()))
    assert read_column(tmp_path / "a.tsv.xz") == ['"Fine", he said', "it's too long"]
    assert read_column(tmp_path / "a.tsv.xz", "label") == ["1", "0"]


@pytest.mark.parametrize(
    ("read", "text", "complaint"),
    [
        (read_corpus, " \n", "holds no text"),
        (read_column, "label\ttexts\n1\tfine\n", "column must be one of 'label', 'texts', .* did you mean 'texts'"),
        (read_column, "label\ttext\n1\tfine\n0\n", r"a.tsv, line 3: expected 2 columns, as in the header, got 1"),
        (read_column, "label\ttext\n", "a header and no rows"),
    ],
)
def test_what_has_no_such_texts_is_told(tmp_path, read, text, complaint):
    (tmp_path / "a.tsv").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read(tmp_path / "a.tsv")


def test_broken_lines_are_joined():
    assert unwrap("one\ntwo\n\n three \fnext") == "one two\nthree\nnext"


def test_a_tokenizer_learns_words_and_loses_nothing():
    tokenizer = train_tokenizer(TEXT, 300)
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 1)
    assert len(tokenizer) <= 300
    ids = encode_corpus(TEXT, tokenizer)
    assert tokenizer.decode(ids.tolist()) == TEXT
    assert len(ids) < len(TEXT) / 2


def test_windows_stay_within_the_corpus_and_repeat():
    ids = torch.arange(50)
    first, again = (windows(ids, 200, 8, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert (first.min(), first.max()) == (0, 49 - 1)
    with pytest.raises(ValueError, match="50 tokens, too few for windows of 50"):
        windows(ids, 1, 50, torch.Generator())
