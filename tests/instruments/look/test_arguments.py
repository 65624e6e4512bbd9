"""Every argument of look is checked before the model runs, and where it can be before the model is built."""

from dataclasses import fields

import pytest
from torch import nn
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.instruments.look.labels import Thresholds
from keyquery.layers import LanguageModel
from keyquery.listening.inputs import data
from keyquery.listening.inputs.load import load_tokenizer

pytestmark = pytest.mark.unchecked  # types are checked by look itself
TEXT = {"text": kq.models.TEXT}
# Arguments, the error, and its words: checked without the model.
ALONE = {
    "length": ({**TEXT, "length": 1}, ValueError, "length must be at least 2, got 1"),
    "length, without text": ({"length": 0}, ValueError, "length must be at least 2, got 0"),
    "length of no number": ({**TEXT, "length": "8"}, TypeError, "length must be an integer, got '8'"),
    "lengths": ({**TEXT, "lengths": [8, 1]}, ValueError, "lengths must be at least 2, got 1"),
    "lengths of no list": ({**TEXT, "lengths": 8}, TypeError, "lengths must be a sequence of integers, got 8"),
    "lengths, without text": ({"lengths": [8]}, ValueError, "lengths are windows of a text"),
    "tokens": ({**TEXT, "tokens": 1}, ValueError, "tokens must be at least 2, got 1"),
    "pairs": ({**TEXT, "pairs": "visble"}, ValueError, "pairs must be one of .* did you mean 'visible'"),
    "sample": ({**TEXT, "sample": -1}, ValueError, "sample must be at least 0, got -1"),
    "directions": ({**TEXT, "directions": -1}, ValueError, "directions must be at least 0, got -1"),
    "window": ({**TEXT, "window": 0}, ValueError, "window must be at least 1, got 0"),
    "workers": ({**TEXT, "workers": 0}, ValueError, "workers must be at least 1, got 0"),
    "name": ({**TEXT, "name": 3}, TypeError, "name must be a string, got 3"),
    "thresholds": ({**TEXT, "thresholds": 0.5}, TypeError, "thresholds must be Thresholds, got a float"),
    "layers of no list": ({**TEXT, "layers": 0}, TypeError, "layers must be a sequence of integers, got 0"),
    "layers of no numbers": ({**TEXT, "layers": "0"}, TypeError, "layers must be a sequence of integers, got '0'"),
    "a text that is not there": ({"text": "gone.txt"}, FileNotFoundError, "file not found: gone.txt"),
    "a text that is no path": ({"text": ["a b"]}, TypeError, "text must be the path of a text file, got a list"),
    "text and inputs": ({**TEXT, "inputs": [{}]}, ValueError, "pass either text or inputs, not both"),
    "inputs": ({"inputs": 3}, TypeError, "inputs must be batches: .* got a int"),
    "an input": ({"inputs": [{}, 3]}, TypeError, "inputs must be batches: .* got a int"),
    "no inputs": ({"inputs": []}, ValueError, "inputs must hold at least one batch"),
    "a corpus that is not there": ({**TEXT, "corpus": "gone.txt"}, FileNotFoundError, "file not found: gone.txt"),
    "a corpus that is no path": ({**TEXT, "corpus": 3}, TypeError, "corpus must be the path of a text file or kq.Coo"),
}
# The same, where the model must be known.
WITH_MODEL = {
    "a layer that is not there": ({"layers": [0, 4]}, "there is no layer 4: LanguageModel has layers 0 to 3"),
    "no layer": ({"layers": []}, "no layer is selected"),
    "a text without a tokenizer": ({"tokenizer": None}, "text needs a tokenizer"),
    "a length without room": ({"lengths": [4, 2], "tokenizer": "framed"}, "length must be at least 3, with 2 special"),
    "a corpus without embeddings": ({"corpus": kq.models.TEXT, "names": "body"}, "corpus needs token embeddings"),
}


class Framed:
    """A tokenizer that puts a token before and after every window."""

    is_fast, pad_token_id = True, 0

    def num_special_tokens_to_add(self):
        return 2

    def __call__(self, text, add_special_tokens=True, **_):
        ids = [len(word) for word in text.split()]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


@pytest.fixture
def model():
    """A model that must not run."""
    live = LanguageModel.load(kq.models.DECODER)
    live.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    return live


@pytest.mark.parametrize("case", ALONE)
def test_arguments_are_checked_before_the_model_is_built(case, model, monkeypatch):
    monkeypatch.setattr(data, "load_model", lambda _: pytest.fail("the model was built"))
    arguments, error, words = ALONE[case]
    for source in (kq.models.DECODER, model):
        with pytest.raises(error, match=words):
            kq.look(source, **{"tokenizer": load_tokenizer(kq.models.DECODER), **arguments})


@pytest.mark.parametrize("case", WITH_MODEL)
def test_arguments_are_checked_before_the_model_runs(case, model):
    arguments, words = WITH_MODEL[case]
    arguments = {**TEXT, "tokenizer": load_tokenizer(kq.models.DECODER), "sample": 4, **arguments}
    if arguments["tokenizer"] == "framed":
        arguments["tokenizer"] = Framed()
    if arguments.pop("names", None):

        class Inner(nn.Module):
            """The blocks alone."""

            main_input_name = "input_ids"

            def __init__(self):
                super().__init__()
                self.body = model.body

            def forward(self, **_):
                pytest.fail("the model ran")

        model = Inner()
    with pytest.raises(ValueError, match=words):
        kq.look(model, **arguments)


@pytest.mark.parametrize("name", [field.name for field in fields(Thresholds)])
def test_thresholds_are_numbers(name):
    with pytest.raises(TypeError, match=f"{name} must be a number, got str"):
        Thresholds(**{name: "0.5"})
    with pytest.raises(ValueError, match=f"{name} must be finite, got nan"):
        Thresholds(**{name: float("nan")})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["look", "{model}", "--html", "{dir}/old.html"], "already exists; use --force"),
        (["look", "{model}", "--json", "{dir}/none/a.json"], "no folder"),
        (["look", "{model}", "--lengths", "4,a"], "--lengths takes numbers"),
        (["look", "{model}", "--text", "{dir}/gone.txt"], "file not found"),
        (["look", "{model}", "--text", "{dir}/text.txt", "--ids", "{dir}/text.txt"], "give --text or --ids, not both"),
        (["look", "{model}", "--ids", "{dir}/text.txt"], "expected token ids"),
        (["look", "{model}", "--text", "{dir}/text.txt", "--pairs", "all"], "pairs must be one of"),
        (["look", "--text", "{dir}/text.txt", "--corpus", "{dir}/gone.txt"], "file not found"),
        (["compare", "{model}", "{dir}/gone", "--text", "{dir}/text.txt"], "is neither a file, nor a folder"),
        (["compare", "{model}", "{dir}/other.json", "--text", "{dir}/text.txt"], "not a look"),
        (["compare", "{model}", "{model}", "--joined"], "give --picture FILE"),
    ],
)
def test_the_command_line_checks_before_the_model_is_built(arguments, words, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "load_model", lambda _: pytest.fail("the model was built"))
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "text.txt").write_text("some words of a text")
    kq.Reading().to_json(tmp_path / "other.json")
    filled = [argument.format(dir=tmp_path, model=kq.models.DECODER) for argument in arguments]
    result = CliRunner().invoke(cli.app, filled)
    assert result.exit_code != 0
    assert words in str(result.exception)
