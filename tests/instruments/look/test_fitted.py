"""Files that estimators have saved: looked at by Python as by the command line, and refused where they are broken."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import keyquery as kq
from keyquery.cli import app
from keyquery.reading import Reading
from tests.fuzz.readers import saved

KINDS = {"series": kq.SeriesClassifier, "events": kq.EventModel, "rows": kq.NPTClassifier}


@pytest.mark.parametrize("kind", ["events", "rows"])
def test_python_and_the_command_line_look_at_the_same(kind, tmp_path):
    saved(kind)(tmp_path)
    path, written = tmp_path / "a.safetensors", tmp_path / "look.json"
    found = kq.look(path)
    asked = CliRunner().invoke(app, ["look", str(path), "--json", str(written), "--quiet"])
    assert asked.exit_code == 0, asked.output
    assert found.model == Reading.load(written).model
    assert found.heads == kq.look(str(path)).heads == kq.look(KINDS[kind].load(path).network_).heads
    assert found.model["name"] == "a.safetensors"
    with pytest.raises(ValueError, match=r"heads is not for .*a\.safetensors, which an estimator has saved"):
        kq.look(path, heads=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(kind, bad, tmp_path):
    saved(kind)(tmp_path)
    path = tmp_path / "a.safetensors"
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    tensors = load_file(path)
    for name in [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()]:
        broken = {**tensors, name: tensors[name].clone()}
        broken[name].view(-1)[0] = bad
        save_file(broken, path, facts)
        with pytest.raises(
            ValueError, match=r"is not a complete \w+ file: .*(NaN or infinity|at times that do not decrease)"
        ):
            KINDS[kind].load(path)


def test_columns_whose_mean_is_no_number_are_refused(tmp_path):
    saved("rows")(tmp_path)
    path = tmp_path / "a.safetensors"
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["keyquery"])
    facts["fields"][0][1] = float("nan")
    save_file(load_file(path), path, {"keyquery": json.dumps(facts)})
    with pytest.raises(ValueError, match="means and scales of its columns hold NaN or infinity"):
        kq.NPTClassifier.load(path)


def test_models_of_keyquerys_own_with_weights_that_are_no_numbers_are_refused(tmp_path):
    from keyquery.layers import LanguageModel

    LanguageModel.load(kq.models.DECODER).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = min(tensors)
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinity"):
        LanguageModel.load(tmp_path)
