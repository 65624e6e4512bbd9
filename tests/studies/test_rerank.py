"""The study of re-ranking: its vectors, its splits, diffusion, and its methods."""

from pathlib import Path

import numpy as np
import pytest
import torch
from keyquery_studies import rerank as module
from keyquery_studies.common import embeddings
from keyquery_studies.common.embeddings import dino_model, passages, text_vectors
from keyquery_studies.rerank import METHODS, split

transformers = pytest.importorskip("transformers")


def test_dino_is_read_from_its_file_by_former_names(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 4}
    model = transformers.Dinov2Model(transformers.Dinov2Config(**sizes, image_size=42, patch_size=14)).eval()
    model.save_pretrained(tmp_path)
    images = torch.randn(3, 3, 70, 70)
    with torch.no_grad():
        expected = model(images).last_hidden_state
        assert torch.allclose(dino_model(tmp_path / "model.safetensors")(images).last_hidden_state, expected)
    (tmp_path / "other").write_text("{}")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        dino_model(tmp_path / "other")


def test_vectors_of_texts_are_means_over_their_tokens(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "sat", "on", "the", "mat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=16)).eval()
    model.save_pretrained(tmp_path)
    transformers.BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    texts = ["a cat sat on the mat", "the mat"]
    for text, vector in zip(texts, text_vectors(texts, tmp_path), strict=True):
        ids = [2, *(words.index(word) for word in text.split()), 3]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        assert np.allclose(vector, expected, atol=1e-5)


def test_classes_to_learn_from_are_not_those_to_test_on():
    labels = np.repeat(np.arange(7), 10)
    learned, queries, database = split(labels, seed=3)
    assert np.array_equal(queries, split(labels, seed=3)[1])
    assert not np.array_equal(queries, split(labels, seed=4)[1])
    assert len(np.unique(labels[learned])) == 3
    assert not set(labels[learned]) & {*labels[queries], *labels[database]}
    assert sorted((*learned, *queries, *database)) == list(range(70))
    assert len(queries) == 8
    with pytest.raises(ValueError, match="labels must have 4 classes or more, half of them for training, got 3"):
        split(labels % 3, seed=0)


def test_the_study_runs_every_method_on_passages_of_works_and_stretches_of_them(study, tmp_path, monkeypatch):
    text = tmp_path / "works.txt"
    works = [" ".join(f"{letter}{number}" for number in range(60 * 26)) for letter in "abcd"]
    text.write_text("\f".join(works))
    found = passages(text, most=100)
    assert np.bincount(found["texts"][1]).tolist() == [25] * 4
    assert np.bincount(found["stretches"][1]).tolist() == [12] * 8
    assert found["stretches"][0][12].startswith("a720 ")  # the second stretch of the first work

    def vectors(texts, folder):
        """Loose groups by the first letter, in an order of their numbers."""
        numbers = np.array([[ord(text[0]) - 96, int(text.split()[0][1:]) / 1560] for text in texts])
        angle = 2 * np.pi * (numbers[:, 0] + numbers[:, 1]) / 4
        return np.stack([np.cos(angle), np.sin(angle), 0.1 * np.sin(99 * angle)], 1)

    monkeypatch.setattr(module, "text_vectors", vectors)
    sizes = [
        part
        for name, value in (("top", 12), ("anchors", 6), ("width", 8), ("steps", 2))
        for part in (f"--{name}", value)
    ]
    reading = study("rerank", "--texts", text, "--encoder", "none", "--items", 100, *sizes, "--seed", 0, "--seed", 1)
    assert {(row["dataset"], row["method"]) for row in reading.rows} == {
        (name, method) for name in ("texts", "stretches") for method in METHODS
    }
    assert [row["gain"] for row in reading.summary() if row["scope"] is None] == [0.0, 0.0]
    assert len(reading.contrasts()) == 12


def test_sources_that_lack_something_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for given, message in (
        ({}, "pass at least one of digits and texts"),
        ({"digits": True}, r"weights \(--weights\) must be given"),
        ({"texts": tmp_path / "a.txt"}, r"encoder \(--encoder\) must be given"),
    ):
        with pytest.raises(ValueError, match=message):
            module.Rerank(**given).run(None, "cpu")


def test_digits_are_embedded_in_batches(monkeypatch):
    class Flat(torch.nn.Module):
        """The mean brightness of every image as its first token."""

        def forward(self, pixel_values):
            output = type("Output", (), {})()
            output.last_hidden_state = pixel_values.mean((1, 2, 3))[:, None, None]
            return output

    monkeypatch.setattr(embeddings, "dino_model", lambda path: Flat())
    vectors, labels = embeddings.digit_vectors(Path("none"))
    images = pytest.importorskip("sklearn.datasets").load_digits().images.mean((1, 2))
    assert len(labels) == len(vectors) == 1797
    assert np.corrcoef(vectors[:, 0], images)[0, 1] > 0.99
