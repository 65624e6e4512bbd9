"""Token ids in place of a text: synthetic prompts, as induction heads are found with."""

import json

import pytest
import torch
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from tests.cli.test_command import main  # noqa: F401

run = CliRunner().invoke


@pytest.fixture
def ids(tmp_path):
    """Random tokens, each sequence repeated, and one of them longer than the windows of a text."""
    torch.manual_seed(0)
    halves = [torch.randint(5, 4096, (length,)).tolist() for length in (12, 20, 90)]
    path = tmp_path / "ids.txt"
    path.write_text("\n".join(" ".join(map(str, half * 2)) for half in halves) + "\n\n")
    return path


def sequences(path):
    return [list(map(int, line.split())) for line in path.read_text().splitlines() if line]


def flat(figures, name=""):
    """Every number of nested figures under its whole name."""
    if not isinstance(figures, (dict, list)):
        return {name: figures}
    items = figures.items() if isinstance(figures, dict) else enumerate(figures)
    return {whole: number for key, one in items for whole, number in flat(one, f"{name}.{key}").items()}


def test_a_look_on_ids_is_that_of_the_same_inputs(ids, tmp_path):
    out = tmp_path / "look.json"
    done = run(cli.app, ["look", str(kq.models.DECODER), "--ids", str(ids), "--json", str(out), "-q"])
    assert done.exit_code == 0, done.output
    found = kq.Reading.load(out)
    rows = sequences(ids)
    batches = [{"input_ids": torch.tensor([row])} for row in rows]  # nothing is padded here
    expected = kq.look(kq.models.DECODER, inputs=batches, length=180)
    assert found.provenance["data"]["from"] == "ids.txt"
    assert found.provenance["data"]["longest"] == 180  # never cut
    assert found.provenance["data"]["tokens"] == sum(map(len, rows))
    for head, other in zip(found.heads, expected.heads, strict=True):
        given, same = flat(head["on_data"]), flat(other["on_data"])
        words = {name: one for name, one in same.items() if isinstance(one, str)}
        assert {name: given.pop(name, None) for name in words} == words
        numbers = {name: one for name, one in same.items() if name not in words}
        assert given == pytest.approx(numbers, rel=1e-4, abs=1e-4)


def test_ids_need_no_model_and_no_tokenizer(ids, tmp_path):
    done = run(cli.app, ["look", "--ids", str(ids)])
    assert done.exit_code == 0, done.output
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((kq.models.DECODER / name).read_bytes())
    arguments = ["dial", str(bare), "--popularity", "0", "--ids", str(ids), "--means", "global", "--samples", "1"]
    done = run(cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert " ".join(map(str, sequences(ids)[0][:12])) in " ".join(done.output.split())


def test_ablate_takes_ids_for_its_figures_and_its_page(ids, tmp_path):
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    files = ["--json", str(out), "--html", str(page)]
    done = run(cli.app, ["ablate", "--heads", "3.0", "--ids", str(ids), "--means", "global", *files, "-q"])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["sequences"] == 3
    said = page.read_text()
    assert " · ids.txt: " in said
    assert " windows, 3 sequences, 244 tokens" in said


WRONG = {
    "words": ("1 2\nthree 4", "line 2: expected token ids (non-negative integers), got 'three'"),
    "a minus": ("1 -2", "line 1: expected token ids (non-negative integers), got '-2'"),
    "no token": ("1 4096", "line 1: token id 4096 is out of range: the model's largest is 4095"),
    "a number without end": ("1 " + "9" * 5000, "line 1: expected token ids"),
    "one": ("1 2\n7", "line 2: a sequence needs at least two token ids, got one"),
    "nothing": ("\n \n", "holds no token ids"),
}


@pytest.mark.parametrize(
    ("command", "case"), [*(("look", case) for case in WRONG), ("dial", "words"), ("ablate", "no token")]
)
def test_wrong_ids_are_told_in_a_sentence(command, case, main, tmp_path):  # noqa: F811
    text, words = WRONG[case]
    path = tmp_path / "ids.txt"
    path.write_text(text)
    code, said = main(command, kq.models.DECODER, "--ids", path)
    assert code == 2
    assert words in said
    assert (said.count("\n"), len(said) < 400) == (1, True)


@pytest.mark.parametrize("command", ["look", "dial", "ablate"])
def test_ids_and_a_text_are_too_much(command, main, ids):  # noqa: F811
    code, said = main(command, kq.models.DECODER, "--ids", ids, "--text", kq.models.TEXT)
    assert (code, "give --text or --ids, not both" in said) == (2, True)


def test_sequences_are_left_out_whole_or_not_at_all(main, ids, tmp_path):  # noqa: F811
    out = tmp_path / "look.json"
    done = run(cli.app, ["look", str(kq.models.DECODER), "--ids", str(ids), "--tokens", "70", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert kq.Reading.load(out).provenance["data"]["tokens"] == 64
    code, said = main("look", kq.models.DECODER, "--ids", ids, "--tokens", "20")
    assert (code, "the first sequence has 24 token ids, more than the limit of 20" in said) == (2, True)
