"""Every argument of look is checked before the model runs, and where it can be before the model is built."""

import pytest
import torch
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.layers import LanguageModel
from keyquery.listening.inputs import data
from keyquery.listening.inputs.load import load_tokenizer

pytestmark = pytest.mark.unchecked  # types are checked by look itself
TEXT = {"text": kq.models.TEXT}
# Arguments, the error, and its words: checked without the model.
ALONE = {
    "length": ({**TEXT, "length": 1}, ValueError, "length must be at least 2, got 1"),
    "length of no number": ({"length": "8"}, TypeError, "length must be an integer, got '8'"),
    "tokens": ({**TEXT, "tokens": 1}, ValueError, "tokens must be at least 2, got 1"),
    "sample": ({**TEXT, "sample": -1}, ValueError, "sample must be at least 0, got -1"),
    "directions": ({"directions": -1}, ValueError, "directions must be at least 0, got -1"),
    "workers": ({"workers": 0}, ValueError, "workers must be at least 1, got 0"),
    "name": ({"name": 3}, TypeError, "name must be a string, got 3"),
    "threshold": ({**TEXT, "threshold": float("nan")}, ValueError, "threshold must be finite, got nan"),
    "layers": ({"layers": "0"}, TypeError, "layers must be a sequence of integers, got '0'"),
    "a text that is not there": ({"text": "gone.txt"}, FileNotFoundError, "file not found: gone.txt"),
    "a text that is no path": ({"text": ["a b"]}, TypeError, "text must be the path of a text file, got a list"),
    "text and inputs": ({**TEXT, "inputs": [{}]}, ValueError, "pass either text or inputs, not both"),
    "an input": ({"inputs": [{}, 3]}, TypeError, "inputs must be batches: .* got a int"),
    "a tensor": ({"inputs": torch.ones(2)}, TypeError, "inputs must be batches: .* got a Tensor"),
    "no inputs": ({"inputs": []}, ValueError, "inputs must hold at least one batch"),
    "costs without data": ({"cost": True}, ValueError, "costs are changes of the loss on data"),
    "a dtype of nothing": ({"dtype": "float32"}, ValueError, "dtype is that of the model that runs"),
}
# The same, where the model must be known.
WITH_MODEL = {
    "a layer that is not there": ({"layers": [0, 4]}, ValueError, "there is no layer 4: LanguageModel has layers 0 to"),
    "no layer": ({"layers": []}, ValueError, "no layer is selected"),
    "a text without a tokenizer": ({"tokenizer": None}, ValueError, "text needs a tokenizer"),
    "an argument of nothing": ({"layer": 3}, TypeError, "unexpected keyword argument 'layer'"),
    "a corpus that is none": ({"corpus": "a.txt"}, TypeError, "corpus must be a kq.Cooccurrence, got a str; kq.Cooc"),
}


@pytest.fixture
def model():
    """A model that must not run."""
    live = LanguageModel.load(kq.models.DECODER)
    live.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    return live


@pytest.mark.parametrize("case", ALONE)
def test_arguments_are_checked_before_the_model_is_built(case, model, monkeypatch):
    monkeypatch.setattr(data, "load_model", lambda *_: pytest.fail("the model was built"))
    arguments, error, words = ALONE[case]
    for source in (kq.models.DECODER, model):
        with pytest.raises(error, match=words):
            kq.look(source, **{"tokenizer": load_tokenizer(kq.models.DECODER), **arguments})


@pytest.mark.parametrize("case", WITH_MODEL)
def test_arguments_are_checked_before_the_model_runs(case, model):
    arguments, error, words = WITH_MODEL[case]
    with pytest.raises(error, match=words):
        kq.look(model, **{**TEXT, "tokenizer": load_tokenizer(kq.models.DECODER), **arguments})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["look", "{model}", "--text", "{dir}/text.txt", "--ids", "{dir}/text.txt"], "give --text or --ids, not both"),
        (["look", "{model}", "--ids", "{dir}/text.txt"], "expected token ids"),
        (["look", "--text", "{dir}/text.txt", "--corpus", "{dir}/gone.txt"], "file not found"),
        (["look", "--num-heads", "4"], "heads needs a model: name one"),
        (["compare", "{model}", "{dir}/gone", "--text", "{dir}/text.txt"], "is neither a file, nor a folder"),
        (["compare", "{model}", "{dir}/other.json", "--text", "{dir}/text.txt"], "not a look"),
    ],
)
def test_the_command_line_checks_before_the_model_is_built(arguments, words, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "load_model", lambda *_: pytest.fail("the model was built"))
    (tmp_path / "text.txt").write_text("some words of a text")
    kq.Reading().to_json(tmp_path / "other.json")
    filled = [argument.format(dir=tmp_path, model=kq.models.DECODER) for argument in arguments]
    result = CliRunner().invoke(cli.app, filled)
    assert result.exit_code != 0
    assert words in str(result.exception)
