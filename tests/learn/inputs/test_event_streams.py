"""Columns of events, times and groups, as users have them, and what is said of bad ones."""

import warnings
from datetime import UTC, date, datetime, timedelta, timezone

import numpy as np
import pandas as pd
import pytest
import torch

from keyquery.learn.inputs.event_streams import longer, stream_of, times_of

NAN = float("nan")


def test_rows_of_groups_may_stand_anywhere():
    stream = stream_of(["x", "y", "z", "x", "y"], [5, 1, 6, 2, 7], ["b", "a", "b", "a", "b"])
    assert stream.groups.tolist() == ["b", "a"]
    assert stream.types.tolist() == ["x", "z", "y", "y", "x"]
    assert stream.times.tolist() == [5, 6, 7, 1, 2]
    assert stream.lengths.tolist() == [3, 2]
    assert stream.gaps.tolist() == [1, 1, 1]
    assert stream.last.tolist() == [7, 2]


def test_times_that_decrease_are_sorted_with_a_warning():
    events, times, groups = ["x", "y", "z", "w"], [3.0, 2.0, 2.0, 1.0], ["a", "a", "a", "b"]
    with pytest.warns(
        UserWarning, match="decrease within a group at 1 row, the first of them row 1; events were sorted"
    ):
        stream = stream_of(events, times, groups)
    assert stream.types.tolist() == ["y", "z", "x", "w"]  # ties stay as they were


EAST, WEST = timezone(timedelta(hours=5)), timezone(timedelta(hours=-8))
MOMENT = datetime(2024, 3, 1, 12, tzinfo=UTC)
SECONDS = 1709294400.0


@pytest.mark.parametrize(
    "times",
    [
        [MOMENT.astimezone(EAST), MOMENT.astimezone(WEST)],  # mixed zones
        np.array(["2024-03-01T12"] * 2, dtype="datetime64[h]"),
        pd.Series([MOMENT.replace(tzinfo=None)] * 2),
        pd.Series([MOMENT] * 2).dt.tz_convert("Asia/Tokyo"),
        pd.DatetimeIndex([MOMENT] * 2).tz_convert("Asia/Tokyo"),
        pd.Series([pd.Timestamp(MOMENT.astimezone(EAST)), pd.Timestamp(MOMENT.astimezone(WEST))], dtype=object),
    ],
    ids=["zones", "numpy", "pandas", "pandas zone", "index", "stamps"],
)
def test_dates_are_seconds_in_utc(times):
    found, clock = times_of(times)
    assert clock == "dates"
    assert found.tolist() == [SECONDS, SECONDS]


@pytest.mark.parametrize(
    ("times", "seconds", "clock"),
    [
        (torch.tensor([1, 2]), [1.0, 2.0], "numbers"),
        ([1, 2.5], [1.0, 2.5], "numbers"),
        ([1709294400.001, 1709294400], [1709294400.001, 1709294400.0], "numbers"),
        (pd.Series([pd.Timedelta(minutes=1), pd.Timedelta(0)]), [60.0, 0.0], "spans"),
        ([timedelta(minutes=1), timedelta(0)], [60.0, 0.0], "spans"),
        ([np.timedelta64(1, "m"), timedelta(0)], [60.0, 0.0], "spans"),
        ([date(1970, 1, 1), date(1970, 1, 3)], [0.0, 172800.0], "dates"),
        ([np.datetime64("1970-01-02"), np.datetime64("1970-01-01T00:00:01")], [86400.0, 1.0], "dates"),
    ],
    ids=str,
)
def test_numbers_spans_and_dates_of_python(times, seconds, clock):
    values, name = times_of(times)
    assert (values.tolist(), name) == (seconds, clock)


def test_precision_that_is_lost_is_told():
    begin = 1_700_000_000 * 10**9
    with pytest.warns(UserWarning, match="9 distinct values of times become equal in float64; subtract the first"):
        times_of(begin + np.arange(10))
    with pytest.warns(UserWarning, match="1 distinct values of times become equal in float64; pass them as numb"):
        times_of((begin + np.array([0, 1, 5000])).astype("M8[ns]"))
    with pytest.warns(UserWarning, match=r"times are float32, with a resolution of 128 at 1.7e.09: smaller gaps"):
        times_of(np.array([1.7e9, 1.7e9 + 500], dtype=np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        times_of(begin + 10**6 * np.arange(10))  # milliseconds, in nanoseconds
        times_of((begin + 10**6 * np.arange(10)).astype("M8[ns]"))
        times_of(np.arange(10, dtype=np.float32) / 4)


def test_columns_of_pyarrow():
    pyarrow = pytest.importorskip("pyarrow")
    when = pyarrow.array([MOMENT, MOMENT], type=pyarrow.timestamp("us", tz="Asia/Tokyo"))
    stream = stream_of(pyarrow.array(["x", "y"]), when, pyarrow.chunked_array([["a"], ["a"]]))
    assert stream.times.tolist() == [SECONDS, SECONDS]
    assert stream.types.tolist() == ["x", "y"]
    coded = pyarrow.chunked_array([pyarrow.array(["x"]).dictionary_encode(), pyarrow.array(["y"]).dictionary_encode()])
    assert stream_of(coded, pyarrow.array([1, 2])).types.tolist() == ["x", "y"]
    for column in (pyarrow.array(["x", None]), pd.Series(["x", None], dtype=pd.ArrowDtype(pyarrow.string()))):
        with pytest.raises(ValueError, match=missing("events", 1)):
            stream_of(column, [1.0, 2.0])


def missing(name, row, count=1):
    return rf"{name} must have a value in every row, got None, NaN or infinity in {count} of \d rows, .* row {row}$"


@pytest.mark.parametrize(
    ("events", "times", "groups", "said"),
    [
        (["x", "y"], [1.0], None, "must have one value per row each, got 2 events, 1 times"),
        ([], [], [], "events must hold at least one row"),
        (["x", None], [1.0, 2.0], None, missing("events", 1)),
        (["x", "y"], [1.0, 2.0], ["a", NAN], missing("groups", 1)),
        (["x"] * 3, [NAN, 1.0, NAN], None, missing("times", 0, 2)),
        (["x"] * 2, pd.Series([pd.NaT, pd.Timestamp(0)]), None, missing("times", 0)),
        (["x"] * 2, [pd.NA, 2.0], None, missing("times", 0)),
        (["x"] * 2, [1, float("inf")], None, "times must be finite numbers or dates, one per row, got inf"),
        (["x"] * 2, [[1.0], [2.0, 3.0]], None, r"times must be finite numbers or dates, one per row, got \[1.0\]"),
        (["x"] * 2, ["2024-01-01", "2024-01-02"], None, "times must be numbers or dates.*pandas.to_datetime to parse"),
        (["x"] * 2, [MOMENT, 3.0], None, "times must be all dates or all numbers, got both"),
        (
            ["x"] * 3,
            [MOMENT, MOMENT, MOMENT.replace(tzinfo=None)],
            None,
            "all have a time zone or none: 2 of 3 have one, and row 2 is the first that differs",
        ),
    ],
)
def test_bad_columns_are_told(events, times, groups, said):
    with pytest.raises(ValueError, match=said):
        stream_of(events, times, groups)


def test_streams_grow_at_the_end_of_each_group():
    stream = stream_of([0, 1, 2], [1.0, 2.0, 5.0], ["a", "a", "b"])
    grown = longer(stream, np.array([7, 8]), np.array([3.0, 9.0]))
    assert grown.types.tolist() == [0, 1, 7, 2, 8]
    assert grown.times.tolist() == [1, 2, 3, 5, 9]
    assert grown.last.tolist() == [3, 9]
