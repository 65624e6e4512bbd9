"""Hub models that lie in the local cache are read by their names, without a network and without the hub's library."""

import os
import shutil
import sys

import pytest

import keyquery as kq
from keyquery.checkpoints.hub import cache_folder, cached, full_names
from keyquery.listening.inputs.load import load_model


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache; and a network that must not be asked."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # what imports it fails
    return tmp_path / "hub"


def keep(hub, name, commit="a1", main=True, weights=True):
    """The decoder that ships, as the hub's library would have put it there: links into blobs."""
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot, blobs = folder / "snapshots" / commit, folder / "blobs"
    for made in (snapshot, blobs, folder / "refs"):
        made.mkdir(parents=True, exist_ok=True)
    for file in sorted(kq.models.DECODER.iterdir()):
        if file.suffix in (".json", *([".safetensors"] if weights else [])):
            shutil.copy(file, blobs / f"{commit}-{file.name}")
            os.symlink(f"../../blobs/{commit}-{file.name}", snapshot / file.name)
    if main:
        (folder / "refs" / "main").write_text(commit)
    return snapshot


def test_a_cached_model_is_read_by_its_name(hub, tmp_path, monkeypatch):
    keep(hub, "someone/decoder")
    monkeypatch.chdir(tmp_path)
    heads = kq.read("someone/decoder")
    assert heads.source.label == "someone/decoder"
    ours, theirs = kq.look("someone/decoder", directions=1), kq.look(kq.models.DECODER, directions=1)
    assert ours.model["name"] == "decoder"
    assert ours.heads == theirs.heads  # with the words of its tokens


def test_a_cached_model_is_run_by_its_name(hub):
    keep(hub, "someone/decoder")
    model, tokenizer = load_model("someone/decoder")
    assert type(model).__name__ == "LanguageModel"
    assert len(tokenizer) == 4096


def test_the_branch_main_goes_first_unless_it_has_no_weights(hub):
    other = keep(hub, "someone/decoder", "b2", main=False)
    main = keep(hub, "someone/decoder", "a1")
    os.utime(other)  # newer
    assert cached("someone/decoder") == main
    (main / "model.safetensors").unlink()
    assert cached("someone/decoder") == other
    assert cached("someone/else") is None


def test_a_folder_of_that_name_goes_before_the_cache(hub, tmp_path, monkeypatch):
    keep(hub, "someone/decoder")
    shutil.copytree(kq.models.ENCODER, tmp_path / "someone" / "decoder")
    monkeypatch.chdir(tmp_path)
    assert not kq.read("someone/decoder")[0].causal


@pytest.mark.parametrize(
    ("variable", "value", "below"),
    [("HF_HUB_CACHE", "own", "own"), ("HF_HOME", "home", "home/hub"), ("XDG_CACHE_HOME", "x", "x/huggingface/hub")],
)
def test_where_the_cache_is(variable, value, below, tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / value))
    assert cache_folder() == tmp_path / below


def test_what_is_not_cached_needs_the_hubs_library(hub):
    with pytest.raises(ImportError, match=r"a hub model needs huggingface_hub: pip install 'keyquery\[hf\]'"):
        kq.read("someone/decoder")


def test_a_bare_name_suggests_the_full_one(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"gpt2 is neither .* did you mean openai-community/gpt2\?"):
        kq.read("gpt2")
    with pytest.raises(FileNotFoundError, match=r"did you mean google-bert/bert-base-uncased\?"):
        load_model("bert-base-uncased")
    keep(hub, "someone/decoder")
    with pytest.raises(FileNotFoundError, match=r"did you mean someone/decoder\?"):
        kq.look("Decoder")
    assert full_names("nowhere") == []


def test_a_model_that_cannot_be_run_from_the_cache_is_said_not_to_be_there(hub):
    with pytest.raises(FileNotFoundError, match="a hub model is run from the local cache, where it was not found"):
        load_model("someone/decoder")
