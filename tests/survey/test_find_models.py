"""Which models a survey means, what they are called, and which step of which run they are."""

import os

import pytest

from keyquery.survey.find_models import find_models, step_of
from tests.survey.checkpoints import llama


def touch(*files):
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def names(*given):
    return [entry.name for entry in find_models(given)]


def test_a_folder_is_its_model_or_all_below_it(tmp_path):
    one, other = llama(tmp_path / "zoo" / "one"), llama(tmp_path / "zoo" / "deeper" / "other")
    touch(tmp_path / "zoo" / "readme" / "notes.md", tmp_path / "zoo" / ".cache" / "model.safetensors")
    assert names(one) == ["one"]
    assert names(tmp_path / "zoo") == ["one", "other"]
    assert [entry.source for entry in find_models([tmp_path / "zoo"])] == [str(one), str(other)]


def test_a_run_is_all_its_steps_and_its_end(tmp_path):
    run = llama(tmp_path / "run")
    for step in (500, 1000, 90):
        llama(run / f"checkpoint-{step}")
    llama(run / "merged")  # no step, and what it is nobody has said
    found = {entry.name: (entry.run, entry.step) for entry in find_models([run])}
    assert found == {
        "run": (None, None),
        "run/checkpoint-1000": ("run", 1000),
        "run/checkpoint-500": ("run", 500),
        "run/checkpoint-90": ("run", 90),
    }


def test_files_without_an_index_are_a_model_each_and_shards_are_one(tmp_path):
    touch(*(tmp_path / "steps" / f"step{i}.safetensors" for i in (0, 8)))
    assert [(e.name, e.run, e.step) for e in find_models([tmp_path / "steps"])] == [
        ("steps/step0.safetensors", "steps", 0),
        ("steps/step8.safetensors", "steps", 8),
    ]
    touch(*(tmp_path / "big" / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)))
    assert names(tmp_path / "big") == ["big"]


def test_globs_and_lists(tmp_path, monkeypatch):
    for name in ("a1", "a2", "b"):
        llama(tmp_path / name)
    touch(tmp_path / "a3.md")
    assert names(tmp_path / "a*") == ["a1", "a2"]
    (tmp_path / "models.txt").write_text("# what we have\nb   # the last\n\na[12]\norg/name\nb\n")
    monkeypatch.chdir(tmp_path)
    found = find_models(["models.txt"])
    assert [entry.name for entry in found] == ["a1", "a2", "b", "org/name"]
    assert [os.path.isabs(entry.source) for entry in found] == [True, True, True, False]


def test_models_of_one_name_are_told_apart_and_runs_too(tmp_path):
    for lab in ("x", "y"):
        llama(tmp_path / lab / "model")
        for step in (1, 2):
            llama(tmp_path / lab / "run" / f"step{step}")
    found = find_models([tmp_path])
    assert [entry.name for entry in found] == [
        "x/model",
        "x/run/step1",
        "x/run/step2",
        "y/model",
        "y/run/step1",
        "y/run/step2",
    ]
    assert [entry.run for entry in found if entry.step] == ["x/run", "x/run", "y/run", "y/run"]


def test_two_kinds_of_steps_in_one_folder_are_two_runs(tmp_path):
    touch(*(tmp_path / "out" / f"{kind}_step{i}.pt" for kind in ("ema", "raw") for i in (1, 2)))
    assert [entry.run for entry in find_models([tmp_path / "out"])] == [
        "out/ema_step#.pt",
        "out/ema_step#.pt",
        "out/raw_step#.pt",
        "out/raw_step#.pt",
    ]


def test_files_are_safe_and_different_whatever_models_are_called(tmp_path):
    for name in ("a b", "a?b", "A-B", "<script>", "é" * 80, "é" * 81):
        llama(tmp_path / name)
    files = [entry.file for entry in find_models([tmp_path])]
    assert len({file.lower() for file in files}) == 6
    assert all(len(file.encode()) < 130 and not set(file) & set("/<>?& '\"") for file in files)


def test_a_name_that_is_no_text_can_be_told(tmp_path):
    folder = llama(tmp_path / os.fsdecode(b"m\xff"))
    (entry,) = find_models([folder])
    assert entry.name == "m\ufffd"
    assert entry.source == str(folder)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("global_step1000", 1000),
        ("iter_0001000", 1000),
        ("epoch=3-step=1000.pt", 1000),
        ("epoch-3", 3),
        ("step143k", 143_000),
        ("step1000-tokens4B", 1000),
        ("gpt2-124m", None),
        ("llama-3", None),
        ("stepwise", None),
        ("v2", None),
        ("²", None),
    ],
)
def test_steps_by_name(name, step):
    assert step_of(name) == step


def test_links_that_lead_in_circles_are_followed_once(tmp_path):
    zoo = tmp_path / "zoo"
    one, other = llama(zoo / "one"), llama(zoo / "deeper" / "other")
    for name in ("again", "self", "up"):
        (zoo / name).symlink_to(".")
        (zoo / "deeper" / name).symlink_to("..")
    assert [entry.source for entry in find_models([zoo])] == [str(one), str(other)]
    assert [entry.source for entry in find_models([f"{zoo}/**/*.safetensors"])] == [
        str(one / "model.safetensors"),
        str(other / "model.safetensors"),
    ]


def test_a_model_is_called_by_its_own_path_and_a_link_out_of_the_folder_is_followed(tmp_path):
    run, elsewhere = tmp_path / "run", llama(tmp_path / "elsewhere" / "step7")
    llama(run / "b" / "step5")
    (run / "a").mkdir()
    (run / "a" / "latest").symlink_to("../b/step5")
    (run / "a" / "step7").symlink_to(elsewhere)
    assert names(run) == ["a/step7", "b/step5"]


def test_lists_are_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llama(tmp_path / "m")
    (tmp_path / "a.txt").write_text("a.txt\nb.txt\nb.txt\nm\n")
    (tmp_path / "b.txt").write_text("a.txt\n")
    assert names("a.txt") == names("b.txt") == names("b.txt", "a.txt") == ["m"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "models must name at least one model, got none"),
        (["none*"], "matches no model"),
        (["empty"], "and its subfolders hold no weights"),
        (["x.txt"], "is not UTF-8"),
        (["blank.txt"], r"blank\.txt lists no models"),
        (["self.txt"], r"self\.txt: these lists name only each other, no models"),
    ],
)
def test_what_means_no_model_is_refused_before_any_work(given, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.txt").write_bytes(b"\xff")
    (tmp_path / "blank.txt").write_text("\n  \n# nothing yet\n")
    (tmp_path / "self.txt").write_text("self.txt\n")
    with pytest.raises((ValueError, OSError), match=words):
        find_models(given)
