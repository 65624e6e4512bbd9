"""Which costs are measured, and how estimates agree with them."""

import pytest
import torch
from scipy.stats import spearmanr

import keyquery as kq
from keyquery.instruments.ablation.plan import CHECK, agreement, flags, plan
from tests.instruments.ablation.oracles import decoder, text

THRESHOLD = 0.003


def row(estimate, half=0.0, why=()):
    return {"estimate": estimate, "estimate_low": estimate - half, "estimate_high": estimate + half, "flags": [*why]}


@pytest.mark.parametrize("budget", [0, 10, 24, 48, 500])
@pytest.mark.parametrize("count", [1, 25, 300])
def test_the_budget_is_kept_and_urgent_costs_come_first(count, budget):
    source = torch.Generator().manual_seed(count)
    values = (0.02 * torch.rand(count, generator=source) - 0.005).tolist()
    rows = [row(value, 0.0005, ["large"] if number % 50 == 7 else []) for number, value in enumerate(values)]
    check, further = plan(rows, "auto", budget, THRESHOLD)
    assert len(check) + len(further) <= max(budget, 0)
    assert len({*check, *further}) == len(check) + len(further)
    assert plan([{}] * count, "all", budget, THRESHOLD) == (list(range(count)), [])  # also without estimates
    assert plan(rows, "none", budget, THRESHOLD) == ([], [])
    if count <= min(budget, CHECK):
        assert (sorted(check), further) == (list(range(count)), [])
        return
    assert len(check) == min(CHECK, budget)
    urgent = {n for n, cost in enumerate(rows) if cost["flags"] or abs(cost["estimate"] - THRESHOLD) <= 0.0005}
    assert set(further) <= urgent - set(check)
    left = urgent - {*check, *further}
    if budget - len(check) > len(further):
        assert not left  # what is measured is all that is worth it, not all that is allowed
    distance = {n: (not rows[n]["flags"], abs(rows[n]["estimate"] - THRESHOLD)) for n in urgent}
    assert all(distance[n] <= distance[other] for n in further for other in left)


def test_the_check_is_random_within_strata_of_the_estimate():
    rows = [row(number / 240) for number in torch.randperm(240, generator=torch.Generator().manual_seed(1)).tolist()]
    check, _ = plan(rows, "auto", CHECK, 9.0)
    assert sorted(int(rows[number]["estimate"] * 240 // 10) for number in check) == list(range(24))
    assert len({round(rows[number]["estimate"] * 240) % 10 for number in check}) > 4  # not the first of each


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        (torch.full((8,), 0.01), []),
        (torch.full((8,), 0.3), ["large"]),
        (torch.tensor([0.1] + [1e-4] * 15), ["few sequences"]),
        (torch.tensor([-8.0] + [1e-4] * 15), ["large", "few sequences"]),
        (torch.tensor([1.0, -1.0] * 4), []),
        (torch.zeros(8), []),
        (torch.tensor([0.01, 0.01]), []),
    ],
)
def test_flags(terms, why):
    assert flags(terms.double()) == why


@pytest.mark.parametrize("ties", [False, True])
def test_agreement_is_that_of_scipy(ties):
    source = torch.Generator().manual_seed(0)
    estimates = torch.randn(40, generator=source, dtype=torch.float64)
    changes = 2 * estimates + torch.randn(40, generator=source, dtype=torch.float64)
    if ties:
        estimates, changes = estimates.round(), changes.round()
    rows = [
        {"estimate": float(e), "change": float(c), "low": float(c) - 0.5, "high": float(c) + 0.5}
        for e, c in zip(estimates, changes, strict=True)
    ]
    check = agreement(rows)
    assert check["cells"] == 40
    assert check["rank_correlation"] == pytest.approx(spearmanr(estimates, changes).statistic)
    assert check["slope"] == pytest.approx(
        sum(r["estimate"] * r["change"] for r in rows) / float(estimates @ estimates)
    )
    inside = [abs(r["estimate"] - r["change"]) <= 0.5 + 0.1 * abs(r["change"]) for r in rows]
    assert check["inside"] == pytest.approx(sum(inside) / 40)
    assert check["poor"] == ["inside"] if check["rank_correlation"] >= 0.8 else ["rank_correlation", "inside"]
    assert agreement(rows[:7]) is None
    assert agreement([{"change": 1.0, "low": 0.0}] * 30) is None


def test_a_reading_says_what_was_measured_and_how_estimates_agree():
    model, batch = decoder("llama"), text(rows=6)
    options = {"changes": ["parts", "zero", "keys 2"], "means": "global", "samples": 2}
    auto = kq.ablate(model, [batch], **options, budget=24)
    assert len(auto.rows) == 52
    assert [row["evidence"] for row in auto.rows].count("measured") == 24 == auto.check["cells"]
    every = kq.ablate(model, [batch], **options, measure="all")
    assert {row["evidence"] for row in every.rows} == {"measured"}
    assert every.check["cells"] == 52
    none = kq.ablate(model, [batch], **options, measure="none")
    assert none.check is None
    assert {row["evidence"] for row in none.rows} == {"estimated"}
    for part, whole, estimate in zip(auto.rows, every.rows, none.rows, strict=True):
        assert part["estimate"] == whole["estimate"] == estimate["estimate"] == estimate["change"]
        expected = whole if part["evidence"] == "measured" else estimate
        assert [part[key] for key in ("change", "low", "high")] == pytest.approx(
            [expected[key] for key in ("change", "low", "high")], abs=1e-12
        )
    assert kq.Reading.load(auto.to_json()) == auto
