"""Models are built from a folder, or from a weights file with config and tokenizer beside it."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import keyquery as kq
from keyquery.listening.inputs.load import has_lm_head, load_model

TEXT = "One line of text.\nAnother line, somewhat longer than the first one.\n" * 8


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(kq.models.DECODER, tmp_path / "model")
    return tmp_path / "model"


def test_a_weights_file_is_run_with_what_lies_beside_it(folder, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    whole = kq.look(folder, tmp_path / "a.txt")
    file = kq.look(folder / "model.safetensors", tmp_path / "a.txt")
    assert file.heads == whole.heads
    assert has_lm_head(folder / "model.safetensors")


def test_a_file_of_another_name_has_its_own_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, folder / "other.safetensors")
    for name, factor in (("model.safetensors", 1), ("other.safetensors", 2)):
        model, tokenizer = load_model(folder / name)
        assert tokenizer is not None
        assert all(
            torch.equal(value, factor * tensors[key]) for key, value in model.state_dict().items() if key in tensors
        )


def test_a_transformers_model_of_another_name(tmp_path):
    pytest.importorskip("transformers", reason="the model needs the extra hf")
    from keyquery.proof.families import tiny_model

    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    torch.save({name: 3 * tensor for name, tensor in model.state_dict().items()}, tmp_path / "step5.bin")
    given, _ = load_model(tmp_path / "step5.bin")
    assert torch.equal(given.embed_tokens.weight, 3 * model.embed_tokens.weight)


def test_a_bare_file_cannot_be_run(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors cannot be run: texts and roles need config\.json"):
        load_model(tmp_path / "a.safetensors")
