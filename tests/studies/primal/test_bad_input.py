"""What the study of primal attention refuses, and what it takes only once."""

from importlib import import_module

import pytest
from keyquery_studies.primal.study import PROTOCOLS, Plan, _source
from keyquery_studies.primal.study import run as run_primal
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli


def test_a_seed_that_is_given_twice_is_one():
    plan = Plan(seeds=(3, 3, 1), tasks=("text", "text"), attentions=("primal", "primal"), datasets=("A", "A"))
    assert (plan.seeds, plan.tasks, plan.attentions, plan.datasets) == ((3, 1), ("text",), ("primal",), ("A",))
    assert len(plan.series({"A": {"digest": "x"}})) == 2 * len(PROTOCOLS)


@pytest.mark.parametrize("name", ["kernels", "dial", "primal"])
def test_commands_take_a_seed_once(name, monkeypatch):
    seen = []

    def run(*given, **named):
        seen.append((given, named))
        return kq.Reading()

    monkeypatch.setattr(import_module(f"keyquery_studies.{name}.study"), "run", run)
    result = CliRunner().invoke(cli.app, ["study", name, "--seed", "1", "--seed", "0", "--seed", "1"])
    assert result.exit_code == 0, result.output
    [(given, named)] = seen
    assert (named["seeds"] if name == "dial" else given[2].seeds) == (1, 0)


def test_heads_divide_the_width():
    with pytest.raises(ValueError, match="heads must divide width: 8 does not divide 17"):
        Plan(width=17).series({"Waves": {"digest": "x"}})


def test_folders_that_are_files_and_results_that_are_none_are_told(series, tmp_path):
    (tmp_path / "file").touch()
    plan = Plan(part="series", seeds=(0,), datasets=("Waves",), attentions=("general",), width=16, epochs=1)
    with pytest.raises(NotADirectoryError, match=r"out must be a folder, and .*file is a file"):
        run_primal(series, tmp_path / "file", plan, "cpu")
    run_primal(series, tmp_path, plan, "cpu")
    [path, _] = sorted((tmp_path / "results").iterdir())
    for text in (path.read_text()[:-9], "[]", ""):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"{path.name} is an incomplete result: delete it to recompute it"):
            run_primal(series, tmp_path, plan, "cpu")
    refused = CliRunner().invoke(cli.app, ["study", "primal", "--out", str(tmp_path / "file")])
    assert refused.exit_code == 2
    assert "'--out'" in refused.output


def test_the_files_of_a_folder_are_found(tmp_path):
    for name in ("a.tsv.xz", "imdb.tsv.xz", "b.npz", "c.npz"):
        (tmp_path / name).touch()
    assert _source("text", tmp_path).name == "imdb.tsv.xz"
    with pytest.raises(ValueError, match=r"data must hold one .npz file for task 'image', got b.npz, c.npz"):
        _source("image", tmp_path)
    with pytest.raises(ValueError, match="data must be a folder"):
        _source("image", tmp_path / "b.npz")
