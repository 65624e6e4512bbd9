"""Columns of labels: their types, what is missing, weights, and labels as JSON."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.exceptions import DataConversionWarning

from keyquery.learn.inputs.targets import (
    classes_of,
    is_missing,
    kept_of,
    label_facts,
    labels_of,
    numbers_of,
    weights_of,
)

NAN = float("nan")
MISSING = "y must have a value in every row, got None, NaN or infinity in 1 of 3 rows, the first of them row 2"


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        (["a", "b", "a"], np.array(["a", "b", "a"])),
        ([1.0, 2, np.int64(3)], None),
        ((True, False, True), np.array([True, False, True])),
        (torch.tensor([1, 0, 2]), np.array([1, 0, 2])),
        (pd.Series([1, 0, 2], dtype="Int64"), np.array([1, 0, 2])),
        (pd.Series(["a", "b", "a"], dtype="string"), np.array(["a", "b", "a"])),
        (pd.Categorical(["a", "b", "a"]), np.array(["a", "b", "a"])),
        (np.ma.masked_array([1, 2, 3], [0, 0, 0]), np.array([1, 2, 3])),
        (np.array(["2020", "2021", "2022"], "M8[Y]"), np.array(["2020", "2021", "2022"], "M8[Y]")),
    ],
    ids=str,
)
def test_labels_keep_their_type(y, expected):
    labels = labels_of("Model", y, 3)
    np.testing.assert_array_equal(labels, np.array([1.0, 2.0, 3.0]) if expected is None else expected, strict=True)


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (None, "Model requires y to be passed, but the target y is None"),
        (["a", "b"], r"inconsistent numbers of samples: \[3, 2\]"),
        ([0.1, 0.2, 0.3], "Unknown label type: y must hold .*, got float64 such as 0.1"),
        ([[1], [2], [3]], r"Unknown label type: y must hold .*, got int64 such as \[1\]"),
        (["a", 1, "b"], "y must hold labels of one type, got int, str"),
        (np.ones((3, 2)), r"y should be a 1d array, got an array of shape \(3, 2\)"),
        ("abc", "y must be a column with one value per row, got str"),
        ([0, 1, NAN], MISSING),
        (["a", "b", None], MISSING),
        (np.array(["2020", "2021", "NaT"], "M8[Y]"), MISSING),
        (pd.Series(["a", "b", None], dtype="string"), MISSING),
        (np.ma.masked_array([0, 1, 0], [0, 0, 1]), MISSING),
    ],
    ids=str,
)
def test_what_is_no_label_is_told(y, said):
    with pytest.raises(ValueError, match=said):
        labels_of("Model", y, 3)


def test_numbers_may_be_a_column():
    with pytest.warns(DataConversionWarning, match="column-vector y was passed"):
        assert numbers_of("Model", np.array([[1], [2]]), 2).tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="could not convert string to float"):
        numbers_of("Model", ["a", "b"], 2)


def test_missing_values_of_any_library():
    missing = (None, NAN, np.float32("nan"), np.datetime64("NaT"), pd.NA, pd.NaT)
    assert all(map(is_missing, missing))
    assert not any(map(is_missing, (0, "", "nan", False, [], np.zeros(2), {"a": 1})))


def test_weights_are_those_of_samples_times_classes():
    labels = np.array(["a", "a", "a", "b"])
    assert weights_of("Model", labels).tolist() == [1.0] * 4
    assert weights_of("Model", labels, torch.tensor([2.0, 0.0, 2.0, 2.0])).tolist() == [1.0, 0.0, 1.0, 1.0]
    assert np.allclose(weights_of("Model", labels, class_weight="balanced"), [2 / 3, 2 / 3, 2 / 3, 2])
    with pytest.raises(ValueError, match="sample_weight must be finite, and not 0 for all"):
        weights_of("Model", labels, class_weight={"a": 0, "b": 0})
    assert kept_of(["x", "y", "z"], np.array([True, False, True]), 3) == ["x", "z"]
    assert kept_of(pd.Series(["x", "y"], index=[7, 8]), np.array([1]), 2).tolist() == ["y"]


@pytest.mark.parametrize(
    "labels", [["b", "é"], np.array([-1, 3], "i1"), np.array(["2020", "2021"], "M8[D]"), [b"a", b"\xff"]], ids=str
)
def test_labels_are_json_and_back(labels):
    again = classes_of(label_facts(np.array(labels)))
    np.testing.assert_array_equal(again, np.array(labels), strict=True)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"dtype": "|O", "labels": [1]}, "labels cannot be of dtype object"),
        ({"dtype": "i8,f8", "labels": [1]}, "labels cannot have this dtype"),
        ({"dtype": "<U999999", "labels": ["a"]}, "labels cannot be of dtype <U999999"),
        ({"dtype": "<i8", "labels": [1, 1]}, "labels must be one or more, in rising order"),
        ({"dtype": "<i8", "labels": []}, "labels must be one or more, in rising order"),
    ],
)
def test_labels_of_a_file_that_no_fit_wrote(facts, said):
    with pytest.raises(ValueError, match=said):
        classes_of(facts)
