"""Token ids in place of a text: synthetic prompts, as induction heads are found with."""

import json

import pytest
import torch

import keyquery as kq
from keyquery.listening.inputs.batches import read_ids
from tests.cli.test_command import main  # noqa: F401
from tests.processes import run


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


def test_a_look_on_ids_is_that_of_the_same_inputs(ids, tmp_path):
    frames = pytest.importorskip("pandas").testing
    out = tmp_path / "look.json"
    run("look", kq.models.DECODER, "--ids", ids, "--json", out, "-q")
    found = kq.Reading.load(out)
    rows = sequences(ids)
    expected = kq.look(kq.models.DECODER, inputs=[{"input_ids": torch.tensor([row])} for row in rows], length=180)
    data = found.provenance["data"]
    assert (data["from"], data["longest"], data["tokens"]) == ("ids.txt", 180, sum(map(len, rows)))  # never cut
    frames.assert_frame_equal(found.to_frame(), expected.to_frame(), rtol=1e-4, atol=1e-4)


def test_ids_need_no_model_and_no_tokenizer(ids, tmp_path):
    run("look", "--ids", ids)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((kq.models.DECODER / name).read_bytes())
    said = run("dial", bare, "--popularity", "0", "--ids", ids, "--means", "global", "--samples", "1")
    assert " ".join(map(str, sequences(ids)[0][:12])) in " ".join(said.split())


def test_ablate_takes_ids_for_its_figures_and_its_page(ids, tmp_path):
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    run("ablate", "--heads", "3.0", "--ids", ids, "--means", "global", "--json", out, "--html", page, "-q")
    assert json.loads(out.read_text())["sequences"] == 3
    said = page.read_text()
    assert " · ids.txt: " in said
    assert " windows, 3 sequences, 244 tokens" in said


WRONG = {
    "1 2\nthree 4": r"line 2: expected token ids \(non-negative integers\), got 'three'",
    "1 -2": r"line 1: expected token ids \(non-negative integers\), got '-2'",
    "1 4096": "line 1: token id 4096 is out of range: the model's largest is 4095",
    "1 " + "9" * 5000: "line 1: expected token ids .{,300}$",
    "1 2\n7": "line 2: a sequence needs at least two token ids, got one",
    "\n \n": "holds no token ids",
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_wrong_ids_are_told_in_a_sentence(text, tmp_path):
    path = tmp_path / "ids.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=WRONG[text]):
        read_ids(path, kq.read(kq.models.DECODER))


@pytest.mark.parametrize("command", ["look", "dial", "ablate"])
def test_commands_tell_what_is_wrong_with_ids(command, main, ids):  # noqa: F811
    code, said = main(command, kq.models.DECODER, "--ids", ids, "--text", kq.models.TEXT)
    assert (code, "give --text or --ids, not both" in said) == (2, True)
    ids.write_text("1 4096")
    code, said = main(command, kq.models.DECODER, "--ids", ids)
    assert (code, "token id 4096 is out of range" in said, said.count("\n")) == (2, True, 1)


def test_sequences_are_left_out_whole_or_not_at_all(main, ids, tmp_path):  # noqa: F811
    out = tmp_path / "look.json"
    run("look", kq.models.DECODER, "--ids", ids, "--tokens", "70", "--json", out)
    assert kq.Reading.load(out).provenance["data"]["tokens"] == 64
    code, said = main("look", kq.models.DECODER, "--ids", ids, "--tokens", "20")
    assert (code, "the first sequence has 24 token ids, more than the limit of 20" in said) == (2, True)
