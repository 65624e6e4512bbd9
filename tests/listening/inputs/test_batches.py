"""Texts become padded windows of token ids, no more than are asked for."""

import pytest
import torch

from keyquery.listening import text_batches, typical_length
from keyquery.listening.inputs.batches import read_lines


class Words:
    """A tokenizer of whole words."""

    pad_token_id = None

    def __call__(self, line):
        return {"input_ids": [len(word) for word in line.split()]}


def test_text_becomes_padded_windows():
    batches = list(text_batches(["a bb ccc dddd eeeee", "ff"], Words(), length=3, size=2))
    assert len(batches) == 1
    assert batches[0]["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batches[0]["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("tokens", range(2, 14))
def test_no_more_tokens_run_than_are_allowed(tokens):
    batches = list(text_batches(["a bb ccc"] * 100, Words(), length=3, tokens=tokens, size=4))
    lengths = [length for batch in batches for length in batch["attention_mask"].sum(1).tolist()]
    left = tokens % 3
    assert lengths == [3] * (tokens // 3) + ([left] if left > 1 else [])


def test_windows_leave_room_for_special_tokens():
    class Marked(Words):
        def num_special_tokens_to_add(self):
            return 2

    with pytest.raises(ValueError, match="length must be at least 3, with 2 special tokens, got 2"):
        list(text_batches(["a bb ccc"], Marked(), length=2))


def test_the_typical_length_is_that_of_the_sequence_of_a_token():
    lengths = [2, 7, 7, 1]
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    owner = [n for n in lengths for _ in range(n)]  # of every token, the length of its sequence
    expected = round(sum(owner) / len(owner))
    assert typical_length([{"attention_mask": mask[:2]}, {"attention_mask": mask[2:].long()}]) == expected
    assert typical_length([{"input_ids": torch.zeros(2, 5, dtype=torch.long)}]) == 5
    assert typical_length([{"pixel_values": torch.zeros(2, 3, 8, 8)}]) is None


def test_too_short_a_text_is_refused():
    with pytest.raises(ValueError, match="too short"):
        list(text_batches(["a", "b"], Words()))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no text"),
        (b" \n\n", "holds no text"),
        (b"caf\xe9 noir", "is not UTF-8 text: byte 0xe9"),
        ("caf\xe9 noir".encode("utf-16-le"), "contains NUL bytes, as UTF-16 does"),
    ],
)
def test_texts_of_no_use_are_named(tmp_path, content, words):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_lines(path)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert read_lines(tmp_path / "a.txt") == ["one", "two"]
