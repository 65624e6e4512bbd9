"""Files that estimators have saved: looked at by Python as by the command line, and refused where they are broken."""

import pytest
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
def test_weights_that_are_no_numbers_are_refused(kind, tmp_path):
    saved(kind)(tmp_path)
    path = tmp_path / "a.safetensors"
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel())
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, path, facts)
    refused = r"is not a complete \w+ file: .*(NaN or infinity|at times that do not decrease)"
    with pytest.raises(ValueError, match=refused):
        KINDS[kind].load(path)
