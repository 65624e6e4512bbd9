"""The study in miniature, its contrasts on rows made by hand, and its statistics against scipy."""

import pytest
import torch
from keyquery_studies.circuit.measures import ROLES, copying
from keyquery_studies.circuit.statistics import area, bootstrapped, rank_correlation
from keyquery_studies.circuit.study import CONTRASTS, Circuit, run
from keyquery_studies.circuit.training import Plan, Size
from scipy.stats import mannwhitneyu, spearmanr, ttest_1samp

import keyquery as kq

pytestmark = pytest.mark.slow  # it trains


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keyquery_studies.circuit.study.Size", lambda: Size(vocabulary=40, width=8, depth=2, heads=1))
        patch.setattr("keyquery_studies.circuit.measures.OTHERS", 4)
        patch.setattr("keyquery_studies.circuit.runs.SEQUENCES", 4)
        return run(out=tmp_path_factory.mktemp("out"), plan=Plan(seeds=2, batch=2, length=34, kept=(0, 1)))


def test_all_heads_of_all_seeds_and_steps_are_measured(reading, tmp_path):
    assert {(row["seed"], row["step"]) for row in reading.models} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len(reading.heads) == 4 * 2
    at_the_end = [r for r in reading.costs if r["step"] == 1 and r["layer"] is not None]
    assert len(at_the_end) == 2 * 2 * (5 + 4 + 5)  # seeds, heads; left out, resampled but position, random
    assert len(reading.followed()) == 4 * 2
    reading.to_json(tmp_path / "circuit.json")
    assert kq.Reading.load(tmp_path / "circuit.json").summary() == reading.summary()


def test_a_model_that_cannot_copy_gives_no_p(reading):
    assert all(row["floor"] and row["p"] is None for row in reading.summary())


def made(accuracy):
    values = {"symmetric": [2.0, 2.2, 2.1], "skew": [1.0, 1.1, 1.3]}
    head = {"model": "m", "seed": None, "step": None, "layer": 0, "head": 0, "roles": [], "raw": 0.1, "folded": 0.1}
    costs = [
        {**head, "part": part, "kind": "mean", "means": "position", "accuracy_before": 0.9, "accuracy": accuracy}
        | {"values": own, "change": sum(own) / 3}
        for part, own in values.items()
    ]
    heads = [{**head, **dict.fromkeys(ROLES, 0.5)}]
    return Circuit(models=[{"name": "m", "seed": None, "step": None}], heads=heads, costs=costs, provenance={})


def test_a_contrast_is_paired_and_counted_and_silent_at_the_floor():
    rows = [row for row in made(0.4).summary() if row["p"] is not None]
    assert [(row["role"], row["first"]) for row in rows] == [
        ("induction", "symmetric mean"),
        ("duplicate_token", "symmetric mean"),
    ]
    differences = torch.tensor([1.0, 1.1, 0.8], dtype=torch.float64)
    p = ttest_1samp(differences, 0).pvalue
    assert rows[0]["change"] == pytest.approx(differences.mean())
    assert rows[0]["p"] == pytest.approx(2 * p)  # Holm: the smaller of two equal ones is doubled
    assert len(made(0.4).summary()) == len(CONTRASTS)
    assert all(row["p"] is None for row in made(0.0).summary())


def test_statistics_agree_with_others():
    generator = torch.Generator().manual_seed(0)
    values, score = torch.rand(2, 50, generator=generator).round(decimals=1)
    has = score > 0.7
    u = mannwhitneyu(values[has], values[~has]).statistic / (has.sum() * (~has).sum())
    assert area(values, has) == pytest.approx(float(u))
    assert rank_correlation(values, score) == pytest.approx(spearmanr(values, score).statistic)
    interval = bootstrapped(area, values, has)
    assert interval.low < interval.change < interval.high


def test_corrupted_sequences_hold_no_repeat():
    task = copying(torch.arange(100), [1], 3, 10, 0)
    assert all(row[1:].unique().numel() == 20 for row in task.corrupted)
    assert torch.equal(task.ids[:, 1:11], task.ids[:, 11:])
    assert not torch.equal(task.others[:3], task.ids)
