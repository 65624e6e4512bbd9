"""Which models a survey means, what they are called, and which step of which run they are."""

import os

import pytest

from keyquery.survey.find_models import find_models, step_of
from tests.survey.checkpoints import llama


def made(folder, *names):
    """A folder with files, and with a model for each name that ends in a slash."""
    for name in names:
        if name.endswith("/"):
            llama(folder / name)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    return folder


def names(*given):
    return [entry.name for entry in find_models(given)]


RUN = ("run/", "run/checkpoint-500/", "run/checkpoint-1000/", "run/checkpoint-90/", "run/merged/")
LABS = [f"{lab}/{name}/" for lab in ("x", "y") for name in ("model", "run/step1", "run/step2")]
STEPS = ("out/ema_step1.pt", "out/ema_step2.pt", "out/raw_step1.pt", "out/raw_step2.pt")
# Files and models, the argument, and the name, run and step of every model.
FOUND = {
    "a folder is its model": (["zoo/one/"], "zoo/one", [("one", None, None)]),
    "or all below it": (
        ["zoo/one/", "zoo/deeper/other/", "zoo/readme/notes.md", "zoo/.cache/model.safetensors"],
        "zoo",
        [("one", None, None), ("other", None, None)],
    ),
    "a run is all its steps and its end": (  # what no step names, nobody has said what it is
        RUN,
        "run",
        [("run", None, None), *((f"run/checkpoint-{step}", "run", step) for step in (1000, 500, 90))],
    ),
    "files without an index are a model each": (
        ["steps/step0.safetensors", "steps/step8.safetensors"],
        "steps",
        [(f"steps/step{step}.safetensors", "steps", step) for step in (0, 8)],
    ),
    "shards are one": ([f"big/model-0000{i}-of-00002.safetensors" for i in (1, 2)], "big", [("big", None, None)]),
    "models of one name are told apart, and runs too": (
        LABS,
        ".",
        [
            (f"{lab}/{name}", step and f"{lab}/run", step)
            for lab in ("x", "y")
            for name, step in (("model", None), ("run/step1", 1), ("run/step2", 2))
        ],
    ),
    "two kinds of steps in one folder are two runs": (
        STEPS,
        "out",
        [(name, f"{name.split('_')[0]}_step#.pt", int(name[-4])) for name in STEPS],
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_models_runs_and_steps(case, tmp_path):
    files, argument, expected = FOUND[case]
    entries = find_models([made(tmp_path, *files) / argument])
    assert [(entry.name, entry.run, entry.step) for entry in entries] == expected
    assert all(os.path.isabs(entry.source) and os.path.exists(entry.source) for entry in entries)


def test_globs_and_lists(tmp_path, monkeypatch):
    made(tmp_path, "a1/", "a2/", "b/", "a3.md")
    assert names(tmp_path / "a*") == ["a1", "a2"]
    (tmp_path / "models.txt").write_text("# what we have\nb   # the last\n\na[12]\norg/name\nb\n")
    monkeypatch.chdir(tmp_path)
    entries = find_models(["models.txt"])
    assert [entry.name for entry in entries] == ["a1", "a2", "b", "org/name"]
    assert [os.path.isabs(entry.source) for entry in entries] == [True, True, True, False]


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
