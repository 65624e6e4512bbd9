"""Options that commands declare once: their defaults are those of Python, and files are checked before any work."""

import inspect

import pytest

import keyquery as kq
from keyquery.cli.commands import MODULES, load
from keyquery.cli.options import FILES, Output, chosen, command, default_of, option
from keyquery.instruments.look.data import LookData


def measure(model, steps=3, length=128):
    """What a command calls."""


def test_a_default_is_that_of_what_the_command_calls():
    declared, seen = {"steps": option(int, "Steps."), "length": option(int, "Tokens.", 64)}, []

    @command("json", "picture", calls=measure, **declared)
    def measured(output: Output, **options) -> None:
        """Say what is done."""
        seen.append((options, output))

    parameters = inspect.signature(measured).parameters
    assert list(parameters) == ["steps", "length", "json", "picture", "quiet", "force"]
    assert (parameters["steps"].default, parameters["length"].default) == (3, 64)
    assert measured.__doc__ == "Say what is done."
    measured(steps=4, length=2, json=None, picture=None, quiet=True, force=False)
    assert seen == [({"steps": 4, "length": 2}, Output({}, quiet=True, force=False))]


def test_every_option_has_a_default_or_is_required():
    for name in MODULES:
        for parameter in load(name).params:
            plain = parameter.default is None or isinstance(parameter.default, (bool, int, float, str))
            assert plain or parameter.required, f"{name} {parameter.name}"
    assert {p.name: p.default for p in load("wiring").params}["seed"] == default_of(kq.wiring, "seed")


def test_all_files_are_checked_before_the_command_starts(tmp_path):
    @command(*FILES)
    def started(*, output: Output) -> None:
        pytest.fail("the command started")

    (tmp_path / "a.json").write_text("old")
    paths = dict.fromkeys(FILES)
    with pytest.raises(FileExistsError, match="use --force"):
        started(**paths | {"json": tmp_path / "a.json"}, quiet=True, force=False)
    with pytest.raises(ValueError, match="--csv and --html name the same file"):
        started(**paths | {"csv": tmp_path / "b", "html": tmp_path / "b"}, quiet=True, force=False)


def test_further_files_are_checked_with_the_others(tmp_path):
    output = Output({"json": tmp_path / "a"}, quiet=True, force=False)
    assert output.also(out=None) == output
    assert output.also(out=tmp_path / "b").files == {"out": tmp_path / "b", "json": tmp_path / "a"}
    with pytest.raises(ValueError, match="--out and --json name the same file"):
        output.also(out=tmp_path / "a")


def test_what_is_not_chosen_keeps_its_default():
    assert chosen(seeds=None, sets=[], kernels=["psd", "skew", "psd"]) == {"kernels": ("psd", "skew")}
    assert default_of(LookData, "threshold") == default_of(kq.ablate, "threshold") == 0.003
