"""Words of a VisualParser by a pretrained text encoder."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.learn.vision_language.words import word_vectors
from tests.learn.vision_language.test_parser import COLOURS, fields, small, texts

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
NAMES = ["[PAD]", "[UNK]", "above", "left", "of", *COLOURS, "crimson"]


@pytest.fixture(scope="module")
def encoder():
    """A tiny BERT, whose "crimson" has the embedding of "red"."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(NAMES),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        table = model.embeddings.word_embeddings.weight
        table.normal_()
        table[NAMES.index("crimson")] = table[NAMES.index("red")]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: n for n, name in enumerate(NAMES)}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    return model, tokenizer


def test_vectors_are_means_of_hidden_states_and_padding_does_not_matter(encoder):
    model, _ = encoder
    found = word_vectors(encoder, ["red", "left of red", "blue"])
    with torch.no_grad():
        alone = (
            model(torch.tensor([[NAMES.index(word) for word in ("left", "of", "red")]])).last_hidden_state[0].mean(0)
        )
    expected = (alone - alone.mean()) / alone.std(unbiased=False)
    assert torch.allclose(found[1], expected, atol=1e-3)
    assert torch.allclose(found[0], word_vectors(encoder, ["red"])[0], atol=1e-5)


def test_it_learns_with_them_and_knows_words_of_the_same_vector(encoder, tmp_path):
    images, said = fields(96, 0)
    model = small(text_encoder=encoder, epochs=3).fit(images, texts(said))
    exchanged = [text.replace("red", "crimson") for text in texts(said)]
    assert any("crimson" in text for text in exchanged)
    plain = model.match(images, texts(said))
    assert np.allclose(model.match(images, exchanged), plain, atol=1e-4)
    without = small(epochs=3).fit(images, texts(said))
    assert not np.allclose(without.match(images, exchanged), without.match(images, texts(said)), atol=1e-4)
    model.save(tmp_path / "model")
    again = kq.VisualParser.load(tmp_path / "model", device="cpu")
    assert np.array_equal(again.match(images, texts(said)), plain)
    again.text_encoder = encoder
    assert np.allclose(again.match(images, exchanged), plain, atol=1e-4)


def test_a_folder_is_the_same_as_the_pair(encoder, tmp_path):
    for part in encoder:
        part.save_pretrained(tmp_path)
    words = ["red", "left"]
    assert torch.allclose(word_vectors(tmp_path, words), word_vectors(encoder, words), atol=1e-5)


def test_what_is_no_text_encoder_is_refused(encoder):
    images, said = fields(8, 0)
    with pytest.raises(TypeError, match="text_encoder must be a folder or a pair"):
        small(text_encoder=encoder[0]).fit(images, texts(said))
    with pytest.raises(ValueError, match="text_encoder must have a tokenizer"):
        small(text_encoder=(encoder[0], None)).fit(images, texts(said))
