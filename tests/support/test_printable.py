"""Texts from files in a terminal: shown, never obeyed, and no longer than a line has room for."""

import json

import pytest
import torch
from safetensors.torch import save_file

import keyquery as kq
from keyquery.support.printable import message, printable, printable_data
from tests.processes import keyquery

# A window title, the clipboard, a cleared screen, C1 forms of the same, text that runs backwards, a broken file name.
HOSTILE = "[/b][bold]:smile:\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x07\x1b[2J\x9b2J\x9d0;owned\x9c\u202egpj\u2066\r\x00"
UNSEEN = [*map(chr, range(32)), *map(chr, range(127, 160)), *"\u202a\u202e\u2066\u2069\u200f\u2028\ufeff", "\udcff"]


@pytest.mark.parametrize("sign", UNSEEN)
def test_what_a_terminal_would_obey_is_written_out(sign):
    shown = printable(f"a{sign}b")
    assert shown.isprintable()
    assert shown.startswith("a\\")
    assert shown.encode().decode("unicode_escape", "surrogatepass").encode("utf-16", "surrogatepass") == (
        f"a{sign}b".encode("utf-16", "surrogatepass")  # nothing is lost
    )


def test_what_shows_something_stays_as_it_is():
    for text in ("naïve 日本語 emoji 🙂 µ", "Ġthe▁", "C:\\new"):
        assert printable(text) == text
    assert printable("a\u00a0b\u3000c") == "a b c"


def test_long_texts_keep_both_ends():
    name = "start" + "x" * 5000 + "end"
    assert (len(printable(name, 80)), printable(name, 80)[:5], printable(name, 80)[-3:]) == (80, "start", "end")
    said = message(f"the file {name} has no tensor {name!r}: give another")
    assert len(said) < 600
    assert said.endswith("end': give another")
    assert len(message("word " * 5000)) <= 2000
    assert printable_data([{name: name}], 50) == [{printable(name, 50): printable(name, 50)}]


@pytest.fixture
def hostile_model(tmp_path):
    """A checkpoint whose folder, config and tensors all carry what a terminal would obey."""
    folder = tmp_path / ("model\x1b]0;owned\x07\u202e[b]" + "n" * 150)
    folder.mkdir()
    prefix = "\x1b]0;owned\x07[/b]" + "t" * 5000 + "."
    tensors = {f"{prefix}layers.{i}.self_attn.{n}_proj.weight": torch.randn(16, 16) for i in range(2) for n in "qkvo"}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": HOSTILE, "num_attention_heads": 2}))
    return folder


def controls(out):
    return [byte for byte in out if byte < 32 and byte != 10]


def test_nothing_in_a_checkpoint_reaches_the_terminal_as_a_command(hostile_model, tmp_path):
    done = keyquery("look", hostile_model, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert controls(done.stdout + done.stderr) == []
    assert all(line.isprintable() for line in text.splitlines())
    assert "model\\x1b]0;owned\\x07\\u202e[b]" in text  # shown, and no markup of rich
    assert "[/b][bold]:smile:" in text.replace("\n", "")
    assert max(map(len, text.splitlines())) < 200
    assert len(text) < 2000


@pytest.mark.parametrize("debug", ["", "1"])
def test_nothing_in_an_error_reaches_the_terminal_as_a_command(hostile_model, debug):
    (hostile_model / "config.json").write_text("{}")
    wrong = "\x1b]0;owned\x07{layer}"
    done = keyquery(
        "look", hostile_model, "--num-heads", 2, "--query", f"{wrong}.q", "--key", f"{wrong}.k", KEYQUERY_DEBUG=debug
    )
    assert done.returncode == 2
    assert controls(done.stdout + done.stderr) == []
    assert "model\\x1b]0;owned" in done.stderr.decode()
    assert len(done.stderr) < 2500 or debug


def test_messages_of_the_library_name_tensors_in_short(hostile_model):
    (hostile_model / "model.safetensors").unlink()
    save_file({"\x1b]0;owned\x07" + "t" * 5000: torch.randn(4, 4)}, hostile_model / "model.safetensors")
    with pytest.raises(ValueError, match=r"is not known\. It holds") as raised:
        kq.read(hostile_model)
    said = str(raised.value).replace(str(hostile_model), "")  # whose name the user gave
    assert said.isprintable()
    assert len(said) < 400


def test_arguments_that_are_wrong_are_told_without_their_controls():
    done = keyquery("look", "one", "two\x1b]0;owned\x07")
    assert done.returncode == 2
    assert controls(done.stderr) == []


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def test_a_terminal_without_utf_8_is_given_ascii(encoding, tmp_path):
    path = tmp_path / "m.pt"
    torch.save({f"blocks.{i}.attn.qkv.weight": torch.randn(48, 16) for i in range(2)}, path)
    plain = {"encoding": encoding}
    done = keyquery("look", path, "--num-heads", 2, **plain)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode(encoding)
    assert "# symmetric" in text
    assert "= skew" in text
    assert "###" in text  # the bars
    shown = keyquery("look", path, "--num-heads", 2).stdout.decode()
    assert len(text.splitlines()) == len(shown.splitlines())
    assert keyquery("look", "--help", **plain).returncode == 0
