"""Tiny models of transformers with a tokenizer beside them, as a user has them on disk."""

import pytest

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "it", "was", "warm", "under", "old", "stone", "by", "my", "bed"]


def folder_with_tokenizer(path, name):
    """A tiny model with a tokenizer of whole words beside it, as a user has it on disk."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    from keyquery.proof.families import tiny_model

    tiny_model(name).save_pretrained(path)
    words = {"[PAD]": 0, "[UNK]": 1, **{word: i + 2 for i, word in enumerate(WORDS)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(path)
    text = path / "text.txt"
    text.write_text("\n".join(" ".join(WORDS[i : i + 9]) for i in range(9)))
    return path, text


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return folder_with_tokenizer(tmp_path_factory.mktemp("bert"), "bert")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return folder_with_tokenizer(tmp_path_factory.mktemp("llama"), "llama")
