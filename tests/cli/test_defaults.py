"""Defaults of the command line are those of Python."""

import inspect
from importlib import import_module

import pytest
from keyquery_studies.rerank.datasets import Sources

import keyquery as kq
from keyquery.cli.commands import MODULES, load
from keyquery.cli.options import FILES, Output, chosen, default_of, writes
from keyquery.instruments.ablation.dialled import dial_effect
from keyquery.layers import Shape
from keyquery.learn.causes.explain import explain
from keyquery.learn.rerank.learned import Reranker
from keyquery.survey import run as survey

STUDIES = import_module("keyquery_studies.cli").COMMANDS  # imported by keyquery.cli as a plugin
PYTHON = {
    "look": [kq.look],
    "compare": [kq.look],
    "survey": [survey],
    "dial": [dial_effect, kq.dial],
    "ablate": [kq.ablate],
    "lineage": [kq.lineage],
    "roles": [kq.roles],
    "attribute": [kq.attribute],
    "wiring": [kq.wiring],
    "causes": [kq.causes, explain],
    "discover": [kq.discover],
    "flow": [kq.flow],
    "rerank": [Reranker],
    "depth": [kq.depth],
}
# What only the command line has: its default, and why.
OWN = {
    ("dial", "tokens"): 4096,  # Python takes batches
    ("dial", "length"): 128,
    ("dial", "device"): "auto",  # and a model on its device
    ("ablate", "tokens"): 4096,
    ("ablate", "length"): 128,
    ("ablate", "device"): "auto",
    ("look", "device"): "auto",  # Python: None, the CPU or where a live model is
    ("compare", "device"): "auto",
    ("roles", "device"): "auto",
    ("causes", "device"): "auto",
    ("attribute", "device"): "auto",
    ("wiring", "device"): "auto",
    ("causes", "largest"): 3,  # Python: 4; the command line masks words for the user, one model run per set
    ("flow", "device"): "auto",
    ("flow", "special"): "leave",  # Python: counted=False
    ("rerank", "most"): 10,  # ranks shown
    ("study objectives", "vocabulary"): 4096,  # of the shape that Python takes
}


def options():
    """Every option with a default: the name of its command, its own, and its default."""
    commands = {name: load(name) for name in PYTHON}
    studies = {f"study {study.__name__}": study for study in STUDIES}
    for name, command in commands.items():
        yield from ((name, each.name, each.default) for each in command.params)
    for name, study in studies.items():
        yield from ((name, each.name, each.default) for each in inspect.signature(study).parameters.values())


SET = [row for row in options() if row[2] not in (None, False, inspect.Parameter.empty) and row[1] != "help"]


def functions(command):
    if not command.startswith("study "):
        return PYTHON[command]
    module = import_module(f"keyquery_studies.{command.removeprefix('study ')}.study")
    more = {"study rerank": [Sources], "study objectives": [Shape]}
    return [module.run, *([module.Plan] if hasattr(module, "Plan") else []), *more.get(command, [])]


@pytest.mark.parametrize(("command", "option", "default"), SET, ids=[f"{row[0]} --{row[1]}" for row in SET])
def test_a_default_is_that_of_python(command, option, default):
    if (command, option) in OWN:
        assert default == OWN[command, option]
        return
    signatures = [inspect.signature(function).parameters for function in functions(command)]
    [expected] = {each[option].default for each in signatures if option in each}
    assert default == expected
    assert type(default) is type(expected)


def test_every_command_is_tested():
    assert {row[0] for row in options()} == {*PYTHON, *(f"study {study.__name__}" for study in STUDIES)}
    assert set(MODULES) - set(PYTHON) == {"monitor", "prove"}  # without a function in Python
    assert set(OWN) <= {row[:2] for row in SET}


# The shared options


def test_files_are_declared_once_for_all_commands():
    seen = []

    @writes("json", "picture")
    def command(steps: int = 3, *, output: Output) -> None:
        """Say what is done."""
        seen.append((steps, output))

    assert list(inspect.signature(command).parameters) == ["steps", "json", "picture", "quiet", "force"]
    assert command.__doc__ == "Say what is done."
    command(steps=4, json=None, picture=None, quiet=True, force=False)
    assert seen == [(4, Output({}, quiet=True, force=False))]


def test_all_files_are_checked_before_the_command_starts(tmp_path):
    @writes(*FILES)
    def command(*, output: Output) -> None:
        pytest.fail("the command started")

    (tmp_path / "a.json").write_text("old")
    paths = dict.fromkeys(FILES)
    with pytest.raises(FileExistsError, match="use --force"):
        command(**paths | {"json": tmp_path / "a.json"}, quiet=True, force=False)
    with pytest.raises(ValueError, match="--csv and --html name the same file"):
        command(**paths | {"csv": tmp_path / "b", "html": tmp_path / "b"}, quiet=True, force=False)


def test_further_files_are_checked_with_the_others(tmp_path):
    output = Output({"json": tmp_path / "a"}, quiet=True, force=False)
    assert output.also(out=None) == output
    assert output.also(out=tmp_path / "b").files == {"out": tmp_path / "b", "json": tmp_path / "a"}
    with pytest.raises(ValueError, match="--out and --json name the same file"):
        output.also(out=tmp_path / "a")


def test_what_is_not_chosen_keeps_its_default():
    assert chosen(seeds=None, sets=[], kernels=["psd", "skew", "psd"]) == {"kernels": ("psd", "skew")}
    assert default_of(kq.look, "threshold") == default_of(kq.ablate, "threshold") == 0.003
