"""Tables as users have them: numbers, categories and what is missing, whatever their container."""

from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from keyquery.learn.data.tables import Table
from keyquery.learn.inputs.tables import check_features, columns_of, encode, fields_of, points_of, target_of

NAN = float("nan")
ROWS = [[1.5, "a", True], [None, None, False], [3, "b", None]]
FRAME = pd.DataFrame(ROWS, columns=["size", "kind", "open"])
TABLE = Table(
    ("size", "kind", "open", "pay"),
    ("numeric", "categorical", "categorical", "numeric"),
    (np.array([1.5, NAN, 3]), np.array([0, -1, 1]), np.array([1, 0, -1]), np.array([7.0, 8, 9])),
    ((), ("a", "b"), ("False", "True"), ()),
    target=3,
)
MASKED = np.ma.masked_array(np.array(ROWS, dtype=object), [[0, 0, 0], [1, 1, 0], [0, 0, 1]])


@pytest.mark.parametrize(
    ("X", "names"),
    [
        (ROWS, None),
        (MASKED, None),
        (FRAME, ["size", "kind", "open"]),
        (FRAME.astype({"kind": "category", "open": "boolean", "size": "Float64"}), ["size", "kind", "open"]),
        (FRAME.assign(size=[Decimal("1.5"), None, Decimal(3)], kind=[b"a", None, b"b"]), ["size", "kind", "open"]),
        (TABLE, ["size", "kind", "open"]),
    ],
    ids=["rows", "masked", "frame", "dtypes", "objects", "table"],
)
def test_containers_of_the_same_table(X, names):
    columns = columns_of(X)
    assert columns.names == names
    np.testing.assert_array_equal(columns.values[0], [1.5, NAN, 3])
    assert [list(column) for column in columns.values[1:]] == [["a", None, "b"], ["True", "False", None]]


def test_columns_are_encoded_as_in_training():
    columns = columns_of(FRAME)
    fields = fields_of(columns)
    assert [(field.name, field.size) for field in fields] == [("size", 0), ("kind", 2), ("open", 2)]
    rows = encode(columns, fields)
    assert rows.values[:, 0].tolist() == [-1, 0, 1]
    assert rows.codes[:, 1:].tolist() == [[0, 1], [0, 0], [1, 0]]
    assert rows.hidden.tolist() == [[False, False, False], [True, True, False], [False, False, True]]
    with pytest.warns(UserWarning, match="'kind' of X holds categories not seen in training: 'c'; .* as missing"):
        assert encode(columns_of([[1.0, "c", True]]), fields).hidden.tolist() == [[False, True, False]]
    with pytest.raises(ValueError, match="'size' of X was numeric in training, but now holds categories"):
        encode(columns_of([["x", "a", True]]), fields)


def test_targets_of_tables():
    assert target_of(TABLE, None).tolist() == [7, 8, 9]
    assert target_of(TABLE, "y") == "y"
    assert target_of(FRAME, None) is None


@pytest.mark.parametrize(
    ("known", "received", "said"),
    [
        (
            (["a", "b"], 2),
            (["b", "c"], 2),
            "unseen at fit time:\n- c\nFeature names seen at fit time, yet now missing:\n- a",
        ),
        ((["a", "b"], 2), (["b", "a"], 2), "in the same order"),
        ((None, 2), (None, 3), "X has 3 features, but Model is expecting 2 features as input"),
    ],
)
def test_features_are_those_of_the_fit(known, received, said):
    with pytest.raises(ValueError, match=said):
        check_features("Model", known, received)
    check_features("Model", known, known)
    with pytest.warns(UserWarning, match="X (does not have valid|has) feature names, but Model was fitted with"):
        check_features("Model", (["a"], 1), (None, 1))


def test_points_are_rows_or_steps_and_numbers():
    table = points_of(pd.DataFrame({"x": [1.0, 2.0], "on": [True, False]}))
    assert (table.values.tolist(), table.owner.tolist(), table.names) == ([[1, 1], [2, 0]], [0, 1], ["x", "on"])
    steps = points_of([[[1.0], [2.0]], [[3.0]]])
    assert (steps.values.tolist(), steps.owner.tolist(), steps.samples) == ([[1], [2], [3]], [0, 0, 1], 2)
    assert steps.chosen(np.array([False, True])).owner.tolist() == [0]
    assert steps.of(np.array([0])).tolist() == [True, True, False]
    with pytest.raises(ValueError, match="1 of 2 points hold NaN, the first in sample 1"):
        points_of([[1.0], [None]])
