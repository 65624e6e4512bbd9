"""EventModel: what it says of tables, questions, parameters and files that are not what they should be."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import keyquery as kq
from tests.learn.events.test_model import QUICK, SMALL, clicks


@pytest.fixture(scope="module")
def fitted():
    return kq.EventModel(**SMALL, epochs=2).fit(*clicks())


@pytest.mark.parametrize(
    ("types", "times", "groups", "said"),
    [
        (["a", "b"], [1.0, 2.0], [0, 1], r"no group has two different times: nothing to train on in 2 group\(s\)"),
        (["a", "b"], [1.0, 1.0], None, "no group has two different times"),
    ],
)
def test_what_teaches_nothing_is_told(types, times, groups, said):
    with pytest.raises(ValueError, match=said):
        kq.EventModel(**QUICK).fit(types, times, groups)


def test_bad_questions_are_told(fitted):
    types, times, who = clicks()
    with pytest.warns(UserWarning, match=r"types that did not occur in training, in 2 of 4 rows: 'dance', 'sing'"):
        fitted.predict(["buy", "sing", "dance", "buy"], range(4))
    with pytest.raises(ValueError, match="no group has a second event: there is nothing to predict"):
        fitted.score(["buy"], [1.0])
    with pytest.raises(ValueError, match=r'at must .* with information="target_time" only: .*information="past"'):
        fitted.predict(types, times, who, at=np.ones(9))
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        fitted.sample(types, times, who, n=0)
    target = kq.EventModel(**QUICK, information="target_time").fit(types, times, who)
    with pytest.raises(ValueError, match='this model was fitted with information="target_time"'):
        target.predict(types, times, who)
    with pytest.raises(ValueError, match="at must hold a time for each of 9 groups, got 2"):
        target.predict(types, times, who, at=[1.0, 2.0])
    with pytest.raises(ValueError, match="at must not be before a group's last event; 9 of 9 are"):
        target.predict(types, times, who, at=np.zeros(9))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"time": "clock"}, "time must be one of 'mercer', 'bochner', 'positions', got 'clock'"),
        ({"time": "positions", "information": "target_time"}, 'information="target_time" needs times'),
        ({"heads": 3}, "heads must divide width: 3 does not divide 16"),
        ({"window": 1}, "window must be at least 2, got 1"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"gap_weight": -1.0}, "gap_weight must be at least 0, got -1.0"),
    ],
)
def test_bad_parameters_are_told(options, said):
    with pytest.raises(ValueError, match=said):
        kq.EventModel(**{**QUICK, **options}).fit(*clicks())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale": 0.0}, "scale must be above 0, got 0.0"),
        ({"clock": "moons"}, "clock must be one of 'numbers', 'dates', 'spans', got 'moons'"),
        ({"log_gaps": [1.0]}, "not enough values to unpack"),
        ({"log_gaps": [0.0, 0.0]}, "deviation of log_gaps must be above 0, got 0.0"),
        ({"classes": {"dtype": "<U5", "labels": ["look", "leave", "buy"]}}, "labels must be one or more, in rising"),
        ({"scale": None}, "scale must be a number"),
        ({"start": ...}, "missing 'start'"),
        (
            {"params": {"width": 200_000}},
            ".*does not match a network with these parameters",
        ),  # huge
        ({"transitions": torch.zeros(2, 2, dtype=torch.int64)}, r"transitions must be non-negative counts, \(3, 3\)"),
        ({"transitions": -torch.ones(3, 3, dtype=torch.int64)}, "transitions must be non-negative counts"),
    ],
)
def test_a_file_that_no_fit_wrote_is_told(fitted, tmp_path, change, said):
    path = tmp_path / "model.safetensors"
    fitted.save(path)
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["keyquery"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, value in change.items():
        where = tensors if isinstance(value, torch.Tensor) else facts
        where[name] = where[name] | value if name == "params" else value
        if value is ...:
            del where[name]
    save_file(tensors, path, {"keyquery": json.dumps(facts)})
    with pytest.raises(ValueError, match=f"is not a complete EventModel file: ({said})"):
        kq.EventModel.load(path, device="cpu")
