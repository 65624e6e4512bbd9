"""`look` from a checkpoint or a saved estimator to the reading, the terminal and the files."""

import csv
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import keyquery as kq
from tests.cli.test_command import main  # noqa: F401
from tests.processes import run


@pytest.fixture(scope="module")
def small():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True) for _ in range(2)]
    return nn.Sequential(*blocks)


# The reading


def test_metrics_equal_dense_algebra(small):
    reading, layer = kq.look(small, name="small"), kq.read(small)[1]
    dense = layer.form.query.double().mT @ layer.form.key.double()
    M, whole = dense[1], dense.sum(0)
    raw = reading.heads[3]["raw"]
    assert raw["symmetry"] == pytest.approx(float((M * M.mT).sum() / M.norm() ** 2))
    assert raw["symmetric_energy"] + raw["skew_energy"] == pytest.approx(float(M.norm() ** 2))
    assert raw["singular_values"] == pytest.approx(torch.linalg.svdvals(M)[:16].tolist())
    assert raw["column_directionality"] == pytest.approx(float(layer.form[1].column_directionality()))
    expected = float((whole * whole.mT).sum() / whole.norm() ** 2)
    assert reading.layers[1]["raw"]["symmetry"] == pytest.approx(expected, abs=1e-6)
    together = kq.Form(torch.eye(32, dtype=torch.float64), whole)
    outliers = float(together.column_directionality())
    assert reading.layers[1]["raw"]["column_directionality"] == pytest.approx(outliers, abs=1e-4)
    assert kq.Reading.load(reading.to_json()) == reading
    frame = reading.to_frame()
    assert frame["raw_symmetry"].tolist() == [head["raw"]["symmetry"] for head in reading.heads]
    assert {"layer", "head", "kind", "rank", "folded_effective_rank", "label", "evidence"} <= set(frame.columns)


def test_views_are_those_of_the_layer(encoder):
    path, _ = encoder
    reading = kq.look(path)
    layer = kq.read(path)[1]
    for view, form in (("raw", layer.form), ("folded", layer.folded)):
        given = [head[view]["symmetry"] for head in reading.heads if head["layer"] == 1]
        assert given == pytest.approx(form.symmetry.tolist())
    assert all(head["on_data"] is None for head in reading.heads)
    assert kq.look(path, layers=[1]).heads == [head for head in reading.heads if head["layer"] == 1]


# Files of estimators

KINDS = {"series": kq.SeriesClassifier, "events": kq.EventModel, "rows": kq.NPTClassifier}
TINY = {"heads": 2, "device": "cpu", "random_state": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One saved estimator of each kind, trained for a step or two."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("estimators")
    series = kq.SeriesClassifier(width=8, depth=1, epochs=1, **TINY)
    series.fit(random.normal(size=(6, 5, 2)), list("aabbab"))
    events = kq.EventModel(width=8, window=3, epochs=1, **TINY)
    events.fit(list("abcabcabcabc"), np.arange(12.0) + random.random(12) / 2, [0] * 6 + [1] * 6)
    rows = kq.NPTClassifier(embedding=8, depth=1, steps=2, **TINY)
    rows.fit(random.normal(size=(12, 2)), list("aabbab") * 2)
    for name, estimator in {"series": series, "events": events, "rows": rows}.items():
        estimator.save(folder / f"{name}.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["events", "rows"])
def test_python_and_the_command_line_look_at_the_same_estimator(kind, files, tmp_path):
    path, written = files / f"{kind}.safetensors", tmp_path / "look.json"
    reading, estimator = kq.look(path), KINDS[kind].load(path)
    run("look", path, "--json", written, "--quiet")
    assert reading.model == kq.Reading.load(written).model
    assert reading.heads == kq.look(estimator).heads == kq.look(estimator.network_).heads
    assert reading.model["name"] == f"{kind}.safetensors"
    assert not kq.compare(path, estimator).changes[0]["rows"][0]["change"]
    with pytest.raises(ValueError, match=rf"heads is not for .*{kind}\.safetensors, which an estimator has saved"):
        kq.look(path, heads=2)


@pytest.mark.parametrize("kind", KINDS)
def test_estimators_whose_weights_are_no_numbers_are_refused(kind, files, tmp_path):
    path = files / f"{kind}.safetensors"
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    tensors, path = load_file(path), tmp_path / "a.safetensors"
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel())
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, path, facts)
    with pytest.raises(ValueError, match=r"is not a complete \w+ file: .*(NaN or infinity|times that do not decrease)"):
        kq.look(path)


# The command line


def test_command_line_shows_every_head(tmp_path):
    (tmp_path / "a.json").write_text("old")
    output = run("look", kq.models.DECODER, "--json", tmp_path / "a.json", "--csv", tmp_path / "a.csv", "--force")
    assert all(f"{layer}.{head} " in output for layer in range(4) for head in range(4))
    assert max(map(len, output.splitlines())) <= 100
    data = json.loads((tmp_path / "a.json").read_text())
    with open(tmp_path / "a.csv") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[5]["raw_symmetry"]) == data["heads"][5]["raw"]["symmetry"]


def test_command_line_on_data(decoder, tmp_path):
    path, text = decoder
    out = tmp_path / "out.json"
    output = run("look", path, "--text", text, "--layers", "1", "--length", "8", "--json", out)
    assert "bars: shares of score variance" in output
    assert "8-token windows" in output
    assert "Labels: " in output
    assert {head["layer"] for head in json.loads(out.read_text())["heads"]} == {1}
    assert max(map(len, output.splitlines())) <= 100


BAD = {
    "an existing file": (["look", "--json", "{dir}/old.json"], "old.json already exists; use --force to replace it"),
    "no such model": (["look", "{dir}/gone"], "is neither a file, nor a folder, nor a hub model"),
    "a broken file": (["look", "{dir}/bad.safetensors"], "is not a readable safetensors file"),
    "no heads": (["look", "{dir}/bare.safetensors"], "it has: give --num-heads"),
    "wrong heads": (["look", "{dir}/bare.safetensors", "--num-heads", "5"], "is not 5 heads of equal width"),
    "text without a model": (["look", "{dir}/bare.safetensors", "--text", "{dir}/old.json"], "cannot be run"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(case, main, tmp_path):  # noqa: F811
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing of the kind, and rather short too")
    save_file({"in_proj_weight": torch.randn(24, 8), "out_proj.weight": torch.eye(8)}, tmp_path / "bare.safetensors")
    before = sorted(path.name for path in tmp_path.iterdir())
    arguments, words = BAD[case]
    code, err = main(*(argument.format(dir=tmp_path) for argument in arguments))
    assert (code, words in err, err.count("\n")) == (2, True, 1), err
    assert (tmp_path / "old.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_model_without_heads_is_refused():
    with pytest.raises(
        ValueError, match=r"Linear has no known attention module: it holds bias, weight; if it has attention"
    ):
        kq.look(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="keys of width 6 beside queries of width 4 have no form"):
        kq.look(nn.MultiheadAttention(4, 2, kdim=6))
