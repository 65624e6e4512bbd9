"""Windows of a text: cut here, the same as by the tokenizers library."""

import pytest

import keyquery as kq
from keyquery.listening import text_batches
from keyquery.listening.inputs.batches import read_lines, special_tokens
from keyquery.listening.inputs.load import load_tokenizer

FRAMES = {"none": None, "both": "[PAD] $A [MASK]", "before": "[PAD] $A", "after": "$A [MASK]:0 [MASK]:0"}
ADDED = {"none": ([], []), "both": ([0], [1]), "before": ([0], []), "after": ([], [1, 1])}


@pytest.fixture(scope="module")
def lines():
    text = read_lines(kq.models.TEXT)
    return [*text, " ".join(text), "one", "[PAD] [MASK] [PAD]"]


def fast(model, frame):
    """A bundled tokenizer as one of transformers, and its backend, which cuts windows itself."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    if FRAMES[frame] is not None:
        added = [("[PAD]", 0), ("[MASK]", 1)]
        backend.post_processor = tokenizers.processors.TemplateProcessing(single=FRAMES[frame], special_tokens=added)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend), backend


def rows(batches):
    pairs = ((batch["input_ids"], batch["attention_mask"]) for batch in batches)
    return [row[kept.bool()].tolist() for ids, mask in pairs for row, kept in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("length", [3, 16, 128])
@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("model", [kq.models.DECODER, kq.models.ENCODER], ids=["decoder", "encoder"])
def test_windows_are_those_of_the_tokenizers_library(model, frame, length, side, lines):
    tokenizer, backend = fast(model, frame)
    tokenizer.truncation_side = side
    actual = rows(text_batches(lines, tokenizer, length, 10**6))
    backend.enable_truncation(length, direction=side)
    whole = [encoding for line in backend.encode_batch(lines) for encoding in (line, *line.overflowing)]
    assert actual == [encoding.ids for encoding in whole if len(encoding.ids) > 1]
    assert special_tokens(tokenizer) == ADDED[frame]


@pytest.mark.parametrize("model", [kq.models.DECODER, kq.models.ENCODER], ids=["decoder", "encoder"])
def test_the_own_tokenizer_gives_the_same_windows(model, lines):
    plain = lines[:-1]  # it reads no special token out of a text
    assert rows(text_batches(plain, load_tokenizer(model), 16)) == rows(text_batches(plain, fast(model, "none")[0], 16))


def test_a_tokenizer_that_returns_only_the_first_window_loses_none():
    class First:
        """Ignores `return_overflowing_tokens`, as some versions of transformers."""

        is_fast, pad_token_id = True, 0

        def num_special_tokens_to_add(self):
            return 2

        def __call__(self, text, add_special_tokens=True, max_length=None, **_):
            ids = [len(word) for word in text.split() if word.isdecimal()]  # knows no letters
            return {"input_ids": [98, *ids, 99][:max_length] if add_special_tokens else ids}

    batches = text_batches(["1 22 333 4444 55555", "letters", "666666"], First(), length=4)
    assert rows(batches) == [[98, 1, 2, 99], [98, 3, 4, 99], [98, 5, 99], [98, 99], [98, 6, 99]]
