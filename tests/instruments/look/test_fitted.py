"""Files that estimators have saved: looked at by Python as by the command line, and refused where they are broken."""

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import keyquery as kq
from keyquery.cli import app
from keyquery.reading import Reading

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
        (folder / name).mkdir()
        estimator.save(folder / name / "a.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["events", "rows"])
def test_python_and_the_command_line_look_at_the_same(kind, files, tmp_path):
    path, written = files / kind / "a.safetensors", tmp_path / "look.json"
    found = kq.look(path)
    asked = CliRunner().invoke(app, ["look", str(path), "--json", str(written), "--quiet"])
    assert asked.exit_code == 0, asked.output
    assert found.model == Reading.load(written).model
    assert found.heads == kq.look(str(path)).heads == kq.look(KINDS[kind].load(path).network_).heads
    assert found.model["name"] == "a.safetensors"
    with pytest.raises(ValueError, match=r"heads is not for .*a\.safetensors, which an estimator has saved"):
        kq.look(path, heads=2)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_no_numbers_are_refused(kind, files, tmp_path):
    path = files / kind / "a.safetensors"
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    tensors, path = load_file(path), tmp_path / "a.safetensors"
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel())
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, path, facts)
    refused = r"is not a complete \w+ file: .*(NaN or infinity|at times that do not decrease)"
    with pytest.raises(ValueError, match=refused):
        KINDS[kind].load(path)
