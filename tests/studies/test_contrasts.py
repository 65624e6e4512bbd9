"""Comparisons that pages name, against plain numpy and scipy on the published rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keyquery_studies.common.comparisons import shown

import keyquery as kq

STUDIES = Path(__file__).parents[2] / "docs" / "studies"
stats = pytest.importorskip("scipy.stats")


def published(name: str) -> Any:
    return kq.Reading.load(STUDIES / f"{name}.json")


def check(row: dict[str, Any], after: list[float], before: list[float]) -> None:
    """Mean, Student's interval (whose quantile is documented to .2 %) and p of paired differences."""
    gaps = np.array(after) - np.array(before)
    half = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / len(gaps) ** 0.5
    assert [row["change"], row["p"]] == pytest.approx([gaps.mean(), stats.ttest_1samp(gaps, 0).pvalue], rel=1e-6)
    assert (row["high"] - row["low"]) / 2 == pytest.approx(half, rel=2e-3)
    assert (row["high"] + row["low"]) / 2 == pytest.approx(gaps.mean(), rel=1e-6)


def check_holm(rows: list[dict[str, Any]]) -> None:
    """Step down by hand: the k-th smallest p times the number of those that are left, never falling."""
    highest = 0.0
    for rank, row in enumerate(sorted(rows, key=lambda row: row["p"])):
        highest = max(highest, min(1.0, row["p"] * (len(rows) - rank)))
        assert row["corrected"] == pytest.approx(highest)


def test_the_factors_of_the_grid() -> None:
    study = published("datapoints")
    rows = [row for row in study.contrasts() if row["of"] == "grid"]
    assert {row["arm"] for row in rows} == {"test rows present", "targets masked", "interaction"}
    for table in {row["table"] for row in rows}:
        cells: dict[int, dict[tuple[bool, bool], float]] = {}
        for row in study.grid:
            if row["table"] == table:
                cells.setdefault(row["fold"], {})[row["transductive"], row["masked"]] = row["rmse"]
        whole = np.array(
            [[[c[t, m] for m in (False, True)] for t in (False, True)] for c in cells.values() if len(c) == 4]
        )
        own = {row["arm"]: row for row in rows if row["table"] == table}
        check(own["test rows present"], whole[:, 1].mean(1), whole[:, 0].mean(1))
        check(own["targets masked"], whole[:, :, 1].mean(1), whole[:, :, 0].mean(1))
        crossed = (whole[:, 1, 1] + whole[:, 0, 0]) / 2, (whole[:, 0, 1] + whole[:, 1, 0]) / 2
        check(own["interaction"], *crossed)
    check_holm(rows)


def test_primal_less_softmax() -> None:
    study = published("primal")
    rows = [row for row in study.contrasts() if row["part"] == "series"]
    assert len(rows) == 16
    for row in rows:
        place = (row["dataset"], row["protocol"])
        arms = [
            [r["accuracy"] for r in sorted(study.series, key=lambda r: r["seed"])
             if (r["dataset"], r["protocol"], r["attention"]) == (*place, attention)]
            for attention in (row["attention"], "general")
        ]  # fmt: skip
        check(row, *arms)
    check_holm(rows)
    check_holm([row for row in study.contrasts() if row["part"] == "text"])


def test_what_the_published_protocol_adds() -> None:
    study = published("primal")
    for row in study.protocols():
        sides: dict[str, Any] = {}
        for protocol in ("held out", "published"):
            own = [r for r in study.series if (r["dataset"], r["protocol"]) == (row["dataset"], protocol)]
            seeds = sorted({r["seed"] for r in own})
            sides[protocol] = np.array(
                [np.mean([(r["last_accuracy"], r["accuracy"]) for r in own if r["seed"] == s], axis=0) for s in seeds]
            )
        data = sides["published"][:, 0], sides["held out"][:, 0]
        epoch = sides["published"][:, 1], sides["published"][:, 0]
        check(row, *(data if row["factor"] == "data" else epoch))
    check_holm(study.protocols())


@pytest.mark.parametrize(("name", "count"), [("rerank", 36), ("vision_language", 48)])
def test_all_comparisons_are_in_one_family(name: str, count: int) -> None:
    rows = published(name).contrasts()
    assert len(rows) == count
    check_holm(rows)


def test_learned_rerankers_less_the_first_ranking() -> None:
    study = published("rerank")
    (row,) = [
        row
        for row in study.contrasts()
        if (row["dataset"], row["top"], row["arm"], row["less"])
        == ("stretches", 128, "learned, general", "first round")
    ]
    own = [r for r in study.rows if (r["dataset"], r["top"]) == ("stretches", 128) and r["scope"] in ("top", None)]
    own.sort(key=lambda r: r["seed"])
    check(row, *([r["average_precision"] for r in own if r["method"] == row[key]] for key in ("arm", "less")))


def test_transport_is_corrected_by_method() -> None:
    rows = published("transport").contrasts()
    for other in ("transformer", "random", "logistic"):
        family = [row for row in rows if row["less"] == other]
        assert len(family) == 15
        check_holm(family)
    epochs = [row for row in rows if row["of"] == "epochs"]
    assert len(epochs) == 6
    check_holm(epochs)


def test_medians_stand_beside_means() -> None:
    study = published("causes")
    row = next(row for row in study.summary() if row["order"] == "gradient" and row["search"] == "prefix")
    own = [r for r in study.records() if all(r[key] == row[key] for key in ("application", "order", "search"))]
    assert row["calls_median"] == np.median([r["calls"] for r in own])
    assert row["size_median"] == np.median([r["size"] for r in own if r["size"] is not None])


def test_a_comparison_as_text() -> None:
    assert (
        shown({"change": -0.04, "low": -0.06, "high": -0.02, "corrected": 0.04}, 1, 100) == "-4.0 [-6.0, -2.0], p 0.040"
    )
