"""Byte-level BPE from the known parts of a file against the library's own reading of the whole file."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keyquery as kq
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.checkpoints.vocabulary import readable, vocabulary

tokenizers = pytest.importorskip("tokenizers")
FILE = kq.models.ENCODER / "tokenizer.json"
OURS = Tokenizer.load(FILE)
THEIRS = tokenizers.Tokenizer.from_file(str(FILE))


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_ids_equal_those_of_the_library(text):
    if "[PAD]" not in text and "[MASK]" not in text:
        assert OURS.encode(text) == THEIRS.encode(text).ids


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
@settings(max_examples=200, deadline=None)
def test_a_text_comes_back_whole(text):
    assert OURS.decode(OURS.encode(text)) == text


def test_special_tokens_are_never_read_out_of_a_text():
    assert OURS.mask_token_id not in OURS.encode("[MASK] and [PAD]")
    assert OURS.decode([OURS.pad_token_id, *OURS.encode("a b"), OURS.mask_token_id]) == "a b"


def test_another_kind_of_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordPiece", "vocab": {"a": 0}}}))
    with pytest.raises(ValueError, match="not byte-level BPE"):
        Tokenizer.load(tmp_path)


def test_words_are_shown_as_people_read_them():
    words = vocabulary(kq.models.ENCODER)
    assert "▁the" in words
    assert readable("Ċ") == "⏎"
    assert len(words) == len(OURS) == 4096
