"""Rules of alarms on made-up records."""

import numpy as np
import pytest

from keyquery.instruments.monitor.alarms import Rules

FOUR = {"largest": [[1.0, 1.0]] * 4, "smallest": [[-1.0, -1.0]] * 4}


def check(rules=None, dtype="float32", **columns):
    history = {name: np.array(values, dtype=float) for name, values in columns.items()}
    return (rules or Rules()).check(history, dtype)


def test_the_largest_logit_raises_an_alarm_above_its_limit():
    assert check(largest=[[999.0]]) == []
    alarm = {"rule": "growth", "heads": [0, 2], "head": 2, "value": 1002.0}
    alarm["why"] = "its largest logit is 1002, above 1000"
    assert check(largest=[[1001.0, np.nan, 1002.0]]) == [alarm]
    assert check(Rules(growth=False), largest=[[2000.0]]) == []


@pytest.mark.parametrize(
    ("rule", "columns"),
    [
        ("dead", {"smallest": [[-1.0, 0.99995]] * 4}),
        ("rank", {"effective_rank": [[20.0, 20.0], [np.nan] * 2, [np.nan] * 2, [19.0, 1.2]]}),
        ("overflow", {"unscaled": [[1.0, 4e4]] * 4}),
        ("overflow", {"finite": [[1.0, 1.0]] * 3 + [[1.0, 0.0]]}),
    ],
)
def test_other_alarms(rule, columns):
    alarms = check(dtype="float16", **{**FOUR, **columns})
    assert [(alarm["rule"], alarm["heads"]) for alarm in alarms] == [(rule, [1])]
    assert check(Rules(**{rule: False}), dtype="float16", **{**FOUR, **columns}) == []
    assert check(dtype="float16", **FOUR) == []


def test_overflow_is_that_of_the_dtype_and_thresholds_are_positive():
    assert check(dtype="bfloat16", **FOUR, unscaled=[[1.0, 4e4]] * 4) == []
    with pytest.raises(ValueError, match="limit must be above 0, got -1"):
        Rules(limit=-1)
