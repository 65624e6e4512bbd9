"""A model that is replaced while it is surveyed is an error, however much the new file looks like the old one."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

import keyquery as kq
from keyquery import survey
from keyquery.survey import worker as work
from tests.survey.checkpoints import llama, results

pytest.importorskip("pyarrow")


def pickled(folder, **options):
    """The same model as a torch file, which workers keep mapped."""
    weights = llama(folder, **options) / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    return folder


def put(path, data, in_place):
    """Other content of the same size, under the same name, with the same time."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    assert len(data) == path.stat().st_size
    if in_place:
        path.write_bytes(data)
    else:
        path.with_name("new").write_bytes(data)
        os.replace(path.with_name("new"), path)
    os.utime(path, ns=times)


@pytest.fixture
def after(monkeypatch):
    """Does something once, when so many layers are measured."""

    def when(count, do):
        measured, real = [], work.look_at_layer

        def look(layer, heads):
            found = real(layer, heads)
            measured.append(layer.index)
            if len(measured) == count:
                do()
            return found

        monkeypatch.setattr(work, "look_at_layer", look)

    return when


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("when", [1, 3])
@pytest.mark.parametrize(("make", "name"), [(llama, "model.safetensors"), (pickled, "pytorch_model.bin")])
@pytest.mark.few(2)
def test_a_model_that_is_replaced_by_its_like_is_an_error_and_not_two_in_one(
    make, name, when, in_place, tmp_path, after
):
    model = make(tmp_path / "zoo" / "m", layers=3)
    other = make(tmp_path / "other" / "m", layers=3, seed=5)
    still = llama(tmp_path / "zoo" / "still", layers=2)
    after(when, lambda: put(model / name, (other / name).read_bytes(), in_place))
    reading = survey.run([model, still], tmp_path / "out", workers=1)
    assert [row["name"] for row in reading.models] == ["still"]
    assert [(row["name"], row["why"]) for row in reading.broken] == [
        ("m", f"{model} changed during the survey: run the same command again to measure it")
    ]
    assert not (tmp_path / "out" / "models" / "m.json").exists()
    reading = survey.run([model, still], tmp_path / "out", workers=1)
    assert reading.broken == []
    look = kq.look(other)
    assert kq.Reading.load(tmp_path / "out" / "models" / "m.json").heads == look.heads
    survey.run([model, still], tmp_path / "new", workers=1)
    assert results(tmp_path / "out") == results(tmp_path / "new")


def test_a_config_that_is_replaced_by_its_like_is_an_error(tmp_path, after):
    model = llama(tmp_path / "zoo" / "m", layers=3)
    config = json.loads((model / "config.json").read_text())
    changed = json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 4}).encode()
    after(1, lambda: put(model / "config.json", changed, in_place=True))
    with pytest.raises(ValueError, match="changed during the survey"):
        survey.run([model], tmp_path / "out", workers=1)


def test_a_file_that_was_replaced_between_two_runs_is_no_error_in_another_folder(tmp_path):
    """What a process knows of a model from one survey is not held against it in the next."""
    model, other = llama(tmp_path / "m"), llama(tmp_path / "other" / "m", seed=5)
    survey.run([model], tmp_path / "one", workers=1)
    put(model / "model.safetensors", (other / "model.safetensors").read_bytes(), in_place=True)
    reading = survey.run([model], tmp_path / "two", workers=1)
    assert reading.broken == []
    assert kq.Reading.load(tmp_path / "two" / "models" / "m.json").heads == kq.look(other).heads
