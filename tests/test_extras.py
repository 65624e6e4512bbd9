"""What is missing names the extra that installs it."""

import sys
import tomllib
from pathlib import Path

import pytest

import keyquery as kq
from keyquery import cli
from keyquery.extras import EXTRAS


def test_every_extra_is_one_of_the_project():
    facts = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(EXTRAS.values()) <= set(facts["project"]["optional-dependencies"])


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("transformers", "hf", lambda: kq.testing.check_family("bert")),
        ("huggingface_hub", "hf", lambda: kq.read("nobody/nothing")),
    ],
)
def test_a_missing_package_names_its_extra(package, extra, use, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package} is not installed: pip install 'keyquery\[{extra}\]'"):
        use()


def test_the_command_names_it_too(monkeypatch, capsys):
    def fail():
        raise ModuleNotFoundError("No module named 'networkx'", name="networkx")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr("sys.argv", ["keyquery"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == "keyquery: networkx is not installed: pip install 'keyquery[causes]'\n"
