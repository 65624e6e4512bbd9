"""Texts as words out of the pieces of tokenizers, and maps merged by words."""

import torch

import keyquery as kq
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.listening.inputs.word_pieces import token_texts, words_of

TEXT = "It was unbelievably cold, and the captain of the ship spoke."


def test_merging_sums_what_is_taken_and_averages_who_takes():
    # Brute force over the pieces.
    words = words_of(TEXT, Tokenizer.load(kq.models.DECODER))
    maps = torch.rand(2, len(words.ids), len(words.ids)).softmax(-1)
    merged = words.merged(maps)
    for i, mine in enumerate(words.places):
        for j, its in enumerate(words.places):
            expected = maps[:, mine][:, :, its].sum(-1).mean(-1)
            assert torch.allclose(merged[:, i, j], expected)


class FakeFast:
    """A fast tokenizer of transformers as far as words need one: pieces of three signs between two special tokens."""

    is_fast = True

    def __call__(self, text, **options):
        spans = [(0, 0)]
        for start in range(0, len(text), 3):
            spans.append((start, min(start + 3, len(text))))
        special = [1, *[0] * (len(spans) - 1), 1]
        ids = list(range(len(spans) + 1))
        return {"input_ids": ids, "offset_mapping": [*spans, (0, 0)], "special_tokens_mask": special}

    def convert_ids_to_tokens(self, ids):
        return [f"[{number}]" for number in ids]


def test_words_by_offsets_and_without_what_the_tokenizer_adds():
    words = words_of("whales dive", FakeFast())  # wha les ␣di ve
    assert words.texts == ["[0]", "whales", "dive", "[5]"]
    assert words.places == [[0], [1, 2], [3, 4], [5]]
    assert words.real == [False, True, True, False]


class FakeSlow:
    """A slow tokenizer of the kind that marks pieces which go on."""

    all_special_ids = (0, 9)

    def __call__(self, text):
        return {"input_ids": [0, 1, 2, 3, 4, 9]}

    def convert_ids_to_tokens(self, ids):
        return [["[CLS]", "un", "##believ", "##able", ".", "", "", "", "", "[SEP]"][number] for number in ids]


def test_words_by_marks_of_pieces():
    words = words_of("unbelievable.", FakeSlow())
    assert words.texts == ["[CLS]", "unbelievable", ".", "[SEP]"]
    assert words.real == [False, True, True, False]


def test_bytes_are_read_as_text_and_blanks_are_shown():
    tokenizer = Tokenizer.load(kq.models.ENCODER)
    assert words_of("naïve là\n", tokenizer).texts == ["naïve", "là", "⏎"]


class Names:
    """A tokenizer of transformers as far as names of tokens go."""

    def __init__(self, *names):
        self.names = names

    def get_vocab(self):
        return {name: number for number, name in enumerate(self.names)}

    def convert_ids_to_tokens(self, ids):
        return [self.names[number] for number in ids]


def test_tokens_of_bytes_are_shown_as_text():
    tokenizer = Names("Ġcafé".replace("é", "Ã©"), "âĢĻ", "Ċ", "Ã", "Ġ", "<s>")
    assert token_texts(range(6), tokenizer) == ["café", "’", "⏎", "<0xC3>", "␣", "<s>"]
    # Letters that are byte symbols as well stay where tokens are no bytes.
    letters = Names("▁Ã", "ö", "▁", "##ing", "é", "Ã©")
    assert token_texts(range(6), letters) == ["Ã", "ö", "␣", "##ing", "é", "Ã©"]
