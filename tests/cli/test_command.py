"""The command as a user runs it: what goes wrong is a sentence, and an interrupt is no traceback."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.cli import commands
from tests.processes import keyquery, run

invoke = CliRunner().invoke


@pytest.fixture
def main(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["keyquery", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, capsys.readouterr().err

    return call


@pytest.fixture
def blocks(tmp_path):
    path = tmp_path / "blocks.safetensors"
    save_file({f"blocks.{i}.attn.qkv.weight": torch.randn(48, 16) for i in range(3)}, path)
    return path


# A shell without job control ignores interrupts for all that it starts in its background, tests too: let them in again.
STARTED = (
    "import signal, sys, keyquery.__main__ as start; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "sys.argv[0] = 'keyquery'; print('up', flush=True); start.main()"
)


@pytest.mark.parametrize("delay", [0.05, 0.4])
def test_an_interrupt_is_told_in_words_at_any_time(delay):
    command = [sys.executable, "-c", STARTED, "look", "--tokens", "1000000", "-q"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"  # before that, it is Python that starts
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "keyquery: interrupted\n")


def test_an_interrupt_inside_a_command_is_told_in_words(monkeypatch):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("keyquery.cli.look"), "look_at", stop)
    done = keyquery("look", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"keyquery: interrupted\n")


def test_a_warning_is_one_line_without_code(monkeypatch):
    monkeypatch.setattr(cli, "app", lambda: warnings.warn("few sequences", stacklevel=1))
    done = keyquery()
    assert (done.returncode, done.stderr) == (0, b"keyquery: warning: few sequences\n")


def test_studies_that_are_not_installed_are_named(main, monkeypatch):
    monkeypatch.setattr(commands, "plugins", dict)
    commands.load.cache_clear()
    code, err = main("study", "dial", "--by", "all")
    commands.load.cache_clear()
    assert (code, "pip install keyquery-studies" in err) == (2, True)


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_what_needs_no_model_imports_no_torch(option):
    """Nor what takes as long; `rich` is for tables, which come with a command."""
    code = (
        "import atexit, sys, keyquery.__main__ as start; sys.argv[:] = ['keyquery', sys.argv[1]]; "
        "atexit.register(lambda: print(sorted({'torch', 'numpy', 'scipy', 'transformers', 'rich'} & {*sys.modules}))); "
        "start.main()"
    )
    out = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    assert option == "--help" or kq.__version__ in out


def test_help_lists_every_command_by_group_with_its_own_first_sentence():
    said = "".join(run("--help").split())  # which breaks words at hyphens, too
    position = 0
    for group, members in commands.GROUPS.items():
        position = said.index("".join(f"{group}:".split()), position)
        for name, (_, summary) in members.items():
            position = said.index(name + "".join(summary.split()), position)
            if name != "study":
                assert " ".join(commands.load(name).help.partition("\n\n")[0].split()) == summary


def test_commands_of_other_packages_are_listed_and_run(monkeypatch):
    app = typer.Typer()
    app.command("hello")(lambda: typer.echo("hello from outside"))
    app.callback()(lambda: None)
    monkeypatch.setattr(commands, "plugins", lambda: {"outside": lambda: app})
    cli_app = typer.Typer(cls=commands.Commands, rich_markup_mode=None)
    cli_app.callback()(lambda: None)
    assert "outside" in invoke(cli_app, ["--help"]).output
    assert invoke(cli_app, ["outside", "hello"]).output == "hello from outside\n"
    commands.load.cache_clear()


@pytest.mark.parametrize("error", [RuntimeError("the engine\nstopped"), AssertionError()])
def test_an_error_that_nobody_foresaw_is_one_line(error, main, monkeypatch):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(import_module("keyquery.cli.look"), "look_at", fail)
    code, err = main("look", "-q")
    assert (code, err.count("\n")) == (2, 1)
    assert re.fullmatch(rf"keyquery: {type(error).__name__}: .*\(KEYQUERY_DEBUG=1 shows where\)\n", err)
    monkeypatch.setenv("KEYQUERY_DEBUG", "1")
    code, err = main("look", "-q")
    assert (code, err[:9]) == (2, "Traceback")


def test_a_csv_that_fails_leaves_no_json(blocks, tmp_path, main, monkeypatch):
    touch, made = Path.touch, []

    def second_fails(path, **options):
        made.append(path)
        if len(made) == 2:
            raise OSError(28, "No space left on device")
        touch(path, **options)

    monkeypatch.setattr(Path, "touch", second_fails)
    before = sorted(os.listdir(tmp_path))
    code, err = main("look", blocks, "--num-heads", 2, "--json", tmp_path / "a.json", "--csv", tmp_path / "a.csv", "-q")
    assert (code, err) == (2, f"keyquery: {tmp_path / 'a.csv'} could not be written: No space left on device\n")
    assert sorted(os.listdir(tmp_path)) == before


def test_models_of_one_name_are_told_apart_by_their_folders(tmp_path, blocks):
    paths = [tmp_path / step / "model" / "blocks.safetensors" for step in ("step1", "step2")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_bytes(blocks.read_bytes())
    output = run("compare", *paths, "--num-heads", "2")
    assert "step1/model/blocks.safetensors" in output
    assert "step2/model/blocks.safetensors" in output


def test_directions_are_shown(tmp_path):
    tensors = {f"layers.{i}.self_attn.{n}_proj.weight": torch.randn(16, 16) for i in range(2) for n in "qkvo"}
    save_file({**tensors, "embed_tokens.weight": torch.randn(40, 16)}, tmp_path / "m.safetensors")
    words = {"tab\there": 0, "\x1b[31mred": 1, "[bold]": 2, **{f"a rather long word {i}": i for i in range(3, 40)}}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    out = tmp_path / "out.json"
    arguments = ["look", tmp_path / "m.safetensors", "--num-heads", "2", "--directions", "2", "--json", out]
    output = run(*arguments)
    lines = output.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b[31m" not in output
    table = lines[next(i for i, line in enumerate(lines) if "query → key" in line) + 1 :][:8]
    assert [line[:4] for line in table[::2]] == ["0.0 ", "0.1 ", "1.0 ", "1.1 "]
    leading = json.loads(out.read_text())["heads"][0]["objects"][0]["tokens"][0]
    assert leading[:12].isprintable() is False or leading[:12] in table[0]
    assert "query → key" not in run(*arguments[:4])


FUSED = "blocks.{layer}.attn.qkv.weight"
WRONG = {  # options after --num-heads, and what is said
    "0": "--num-heads must be at least 1, got 0",
    "2 --config nope.json": "config must be a JSON file, and nope",
    "2 --query b.{layer}.q --key b.{layer}.k": "has no tensor 'b.{layer}.q'; it holds blocks.{layer}.",
    f"2 --query {FUSED} --key b.{{layer}}.k.weight": "lacks b.0.k.weight",
    **{
        f"2 --layers={layers}": "--layers takes numbers below 100000 and ranges"
        for layers in ("0-999999999", "²", "2-1", "", "-1")
    },
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_options_are_one_sentence(options, blocks, main):
    code, err = main("look", blocks, "--num-heads", *options.split())
    assert (code, WRONG[options] in err, err.count("\n")) == (2, True, 1)


def test_dial_says_what_is_lost_and_writes_it(tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("It was a long time before she spoke. He looked at her and said nothing at all.\n" * 3)
    assert "change +0.000" in run("dial", "--text", text, "--means", "global", "--samples", "0")
    options = ["--popularity", "0", "--heads", "2.*", "--json", out, "--means", "global", "--samples", "1"]
    output = run("dial", "--text", text, *options)
    assert "decoder: popularity × 0 in heads 2.*" in output
    assert "after" in output
    assert kq.Reading.load(out).change > 0


def test_ablate_says_which_parts_matter(tmp_path):
    page, table = tmp_path / "page.html", tmp_path / "rows.csv"
    words = ["ablate", "--heads", "3.*", "--tokens", "200", "--length", "40", "--means", "global"]
    output = run(*words, "--html", page, "--csv", table)
    assert "estimates against measurements of 12 cells: rank correlation" in output
    assert "popularity" in output
    assert len(table.read_text().splitlines()) == 1 + 4 * 3
    assert '"off.popularity"' in page.read_text()


def test_ablate_estimates_directions_and_keys(tmp_path):
    table = tmp_path / "rows.csv"
    options = ["--heads", "2.2", "--changes", "skew directions 2, keys 4", "--measure", "none", "--csv", table]
    output = run("ablate", *options, "--tokens", "200", "--length", "40")
    assert "~: estimated, not measured (3 of 3)." in output
    assert table.read_text().splitlines()[0].startswith("layer,head,part,direction,value,share,change")
    assert "keys 4" in table.read_text()


SURGERY = {
    "dial --heads 9.*": "there is no self-attention layer 9",
    "dial --heads 3.1 --of skew": "--of, --gain and --on are for --directions, which is missing",
    "dial --directions 0": "name them, such as 18.6",
    "dial --directions x --heads 0.1": "--directions takes numbers",
    "dial --device cuda": "there is no GPU here",
    "dial .": "cannot be run",
    "ablate --by layer --html a.html": "--html requires --by head",
    "ablate --by neuron": "--by must be",
    "ablate --changes skw": "there is no change 'skw': try symmetric, only position, zero",
    "ablate --measure some": "--measure must be one of 'auto', 'all', 'none'",
    "ablate --means position --tokens 400 --length 40": "'symmetric' is about means by position, which need 32 "
    "sequences, got 1",
    "look --tokens 1": "Invalid value for '--tokens'",  # typer's own
}


@pytest.mark.parametrize("words", SURGERY)
def test_bad_surgery_is_told_in_a_sentence(words, main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = main(*words.split())
    assert (code, SURGERY[words] in " ".join(said.split())) == (2, True), said


@pytest.mark.parametrize("value", ["-1", "٣", "9" * 5000])
def test_a_rank_that_is_no_number_is_one_sentence(value, main, monkeypatch):
    monkeypatch.setenv("RANK", value)
    code, err = main("--version")
    assert code == 2
    assert err.startswith("keyquery: the environment variable RANK must be a number, as set by torchrun, got ")
    assert err.count("\n") == 1
