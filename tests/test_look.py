"""`look` from the model to the terminal, the files and the picture."""

import csv
import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli, models

run = CliRunner().invoke


@pytest.fixture(scope="module")
def reading():
    return kq.look(models.seeded(layers=2, heads=2, width=32), name="small")


def test_seeded_models_repeat_and_their_layers_differ():
    first, second, other = models.seeded(0), models.seeded(0), models.seeded(1)
    weights = [next(iter(kq.read(model))).form.query for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    layers = [layer.form.query for layer in kq.read(first)]
    assert not torch.equal(layers[0], layers[1])


def test_a_seed_does_not_disturb_the_random_state():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    models.seeded(0)
    assert torch.equal(torch.rand(1), expected)


def test_heads_are_those_of_the_running_model():
    """Scores of the Form, scaled, are the logits whose softmax nn.MultiheadAttention returns."""
    attention = nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
    x = torch.randn(1, 5, 12)
    _, weights = attention(x, x, x, average_attn_weights=False)
    (layer,) = kq.read(attention)
    torch.testing.assert_close((layer.form.scores(x[0]) * layer.scale).softmax(-1), weights[0])


def test_figures_equal_dense_algebra(reading):
    model = models.seeded(layers=2, heads=2, width=32)
    layer = list(kq.read(model))[1]
    dense = layer.form.query.double().mT @ layer.form.key.double()
    M, whole = dense[1], dense.sum(0)
    raw = reading.heads[3]["raw"]
    assert raw["symmetry"] == pytest.approx(float((M * M.mT).sum() / M.norm() ** 2))
    assert raw["symmetric_energy"] + raw["skew_energy"] == pytest.approx(float(M.norm() ** 2))
    assert raw["singular_values"] == pytest.approx(torch.linalg.svdvals(M)[:16].tolist())
    expected = float((whole * whole.mT).sum() / whole.norm() ** 2)
    assert reading.layers[1]["raw"]["symmetry"] == pytest.approx(expected)


def test_reading_goes_through_json_frame_and_picture(reading):
    assert kq.Reading.load(reading.to_json()) == reading
    frame = reading.to_frame()
    assert len(frame) == 4
    assert {"layer", "head", "name", "symmetry", "effective_rank"} <= set(frame.columns)
    figure = reading.plot()
    image = figure.axes[0].images[0].get_array()
    assert image.shape == (2, 2)
    assert image[1, 0] == reading.heads[2]["raw"]["symmetry"]


def test_command_line_shows_every_head(tmp_path):
    result = run(cli.app, ["look", "--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")])
    assert result.exit_code == 0, result.output
    assert all(f"{layer}.{head} " in result.output for layer in range(4) for head in range(4))
    assert max(map(len, result.output.splitlines())) <= 100
    data = json.loads((tmp_path / "a.json").read_text())
    assert (data["schema"], data["kind"], len(data["layers"]), len(data["heads"])) == (1, "look", 4, 16)
    with open(tmp_path / "a.csv") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[5]["symmetry"]) == data["heads"][5]["raw"]["symmetry"]


def test_the_seed_is_used(tmp_path):
    for seed in ("0", "1"):
        assert run(cli.app, ["look", "-q", "--seed", seed, "--csv", str(tmp_path / seed)]).exit_code == 0
    assert (tmp_path / "0").read_text() != (tmp_path / "1").read_text()


def test_python_dash_m():
    out = subprocess.run([sys.executable, "-m", "keyquery", "--version"], capture_output=True, text=True, check=True)
    assert out.stdout.startswith("keyquery ")


def test_quiet_prints_nothing():
    assert run(cli.app, ["look", "--quiet"]).output == ""


def test_version():
    assert run(cli.app, ["--version"]).output == f"keyquery {kq.__version__}\n"


def main(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["keyquery", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["look", "--json", "{dir}/old.json"], "old.json exists; --force replaces it"),
        (["look", "--csv", "{dir}/none/a.csv"], "no folder"),
        (["look", "--csv", "{dir}/old.json/a.csv"], "no folder"),
        (["look", "--json", "{dir}"], "is a folder; name a file"),
        (["look", "--json", "{dir}/a", "--csv", "{dir}/a"], "--json and --csv name the same file"),
    ],
)
def test_a_wrong_path_is_one_sentence_and_exit_code_2(arguments, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "old.json").write_text("old")
    code = main(monkeypatch, *(a.format(dir=tmp_path) for a in arguments))
    _, err = capsys.readouterr()
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1
    assert (tmp_path / "old.json").read_text() == "old"


def test_force_replaces(tmp_path):
    path = tmp_path / "old.json"
    path.write_text("old")
    assert run(cli.app, ["look", "-q", "--force", "--json", str(path)]).exit_code == 0
    assert path.read_text().startswith('{"schema": 1')


@pytest.mark.parametrize("arguments", [["look", "--seed", "-1"], ["lok"], ["look", "--seed", "x"]])
def test_wrong_words_give_exit_code_2(arguments, monkeypatch, capsys):
    assert main(monkeypatch, *arguments) == 2


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (nn.Linear(2, 2), ValueError, "model has no nn.MultiheadAttention; it is made of Linear"),
        ("model.safetensors", TypeError, "model must be a torch.nn.Module, got str"),
        (nn.MultiheadAttention(4, 2, kdim=6), ValueError, "keys of width 6 beside queries of width 4"),
    ],
)
def test_a_model_without_heads_is_refused(model, error, words):
    with pytest.raises(error, match=words):
        kq.look(model)
