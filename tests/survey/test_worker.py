"""A config that is replaced while its model is surveyed, and what a worker keeps of a model between surveys."""

import json
import os

import pytest

import keyquery as kq
from keyquery import survey
from keyquery.survey import worker as work
from tests.survey.checkpoints import llama

pytest.importorskip("pyarrow")


def put(path, data):
    """Other content of the same size, under the same name, with the same time."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    assert len(data) == path.stat().st_size
    path.write_bytes(data)
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


def test_a_config_that_is_replaced_by_its_like_is_an_error(tmp_path, after):
    model = llama(tmp_path / "zoo" / "m", layers=3)
    config = json.loads((model / "config.json").read_text())
    changed = json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 4}).encode()
    after(1, lambda: put(model / "config.json", changed))
    with pytest.raises(ValueError, match="changed during the survey"):
        survey.run([model], tmp_path / "out", workers=1)


def test_a_file_that_was_replaced_between_two_runs_is_no_error_in_another_folder(tmp_path):
    """What a process knows of a model from one survey is not held against it in the next."""
    model, other = llama(tmp_path / "m"), llama(tmp_path / "other" / "m", seed=5)
    survey.run([model], tmp_path / "one", workers=1)
    put(model / "model.safetensors", (other / "model.safetensors").read_bytes())
    reading = survey.run([model], tmp_path / "two", workers=1)
    assert reading.broken == []
    assert kq.Reading.load(tmp_path / "two" / "models" / "m.json").heads == kq.look(other).heads
