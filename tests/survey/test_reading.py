"""What is said across models, by hand."""

import numpy as np
import pytest

import keyquery as kq
from keyquery.survey.reading import answer, final


def model(name, symmetry, run=None, step=None, family="llama", parameters=1000, attention="causal"):
    facts = {"name": name, "symmetry": symmetry, "run": run, "step": step, "family": family}
    return {**facts, "parameters": parameters, "attention": attention, "heads": 4}


def test_runs_by_hand():
    values = {0: 0.1, 10: 0.05, 20: 0.35, 40: 0.5}
    models = [model(f"a/{step}", value, "a", step) for step, value in values.items()]
    down = [model(f"b/{step}", -value, "b", step) for step, value in values.items()]
    single = [model("c/7", 0.3, "c", 7)]
    a, b = answer([*reversed(models), *down, *single])["runs"]
    assert (a["run"], a["first"], a["last"], a["steps"], a["half"]) == ("a", 0, 40, 4, 20)
    assert a["change"] == pytest.approx(0.4)
    assert a["rises"] == pytest.approx(0.8)
    assert (b["half"], b["change"]) == (20, pytest.approx(-0.4))
    flat = answer([model("d/1", 0.2, "d", 1), model("d/2", 0.2, "d", 2)])["runs"][0]
    assert (flat["change"], flat["half"], flat["rises"]) == (0.0, None, None)


def test_a_run_counts_once_over_sizes_and_families():
    steps = [model(f"a/{step}", 0.9, "a", step, parameters=10) for step in range(50)]
    others = [model(str(n), 0.1 * n, parameters=10**n) for n in (2, 3, 4)]
    assert [row["name"] for row in final([*steps, *others, others[0]])] == ["a/49", "2", "3", "4"]  # as do equal names
    found = answer([*steps, *others])
    assert found["families"][0]["models"] == 4
    assert found["families"][0]["symmetry"] == pytest.approx(0.35)
    (row,) = found["sizes"]  # one family is all families, and told once
    x, y = np.array([1, 2, 3, 4]), np.array([0.9, 0.2, 0.3, 0.4])
    assert row["slope"] == pytest.approx(((x - 2.5) @ (y - y.mean())) / ((x - 2.5) @ (x - 2.5)))
    assert (row["smallest"], row["largest"], row["models"]) == (10, 10_000, 4)


def test_two_sizes_are_no_trend_and_families_are_split_by_attention():
    rows = [model("e", 0.4, family="bert", attention="bidirectional"), model("d", -0.1, parameters=9), model("f", 0.1)]
    found = answer(rows)
    assert found["sizes"] == []
    assert [(row["family"], row["attention"], row["models"]) for row in found["families"]] == [
        ("bert", "bidirectional", 1),
        ("llama", "causal", 2),
    ]
    assert (found["families"][1]["lowest"], found["families"][1]["highest"]) == (-0.1, 0.1)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"models": "x"', "models must be a list, got 'x'"),
        ('"models": [], "runs": [{}]', "steps in runs of a survey must be a number, got None"),
        ('"models": [], "sizes": [{"models": 3, "smallest": 1, "largest": 2, "slope": null}]', "slope in sizes"),
    ],
)
def test_answers_of_another_kind_are_refused(text, words):
    with pytest.raises(ValueError, match=f"not a reading of kind 'survey': .*{words}"):
        kq.Reading.load(f'{{"schema": 1, "kind": "survey", {text}}}')
