"""Event models where something is not seen: silence so far, censoring, unknown types, a single type, interrupts."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import integrate
from sklearn.model_selection import GridSearchCV, GroupKFold
from torch.distributions import Categorical, LogNormal, MixtureSameFamily

import keyquery as kq
from keyquery.learn.events.network import Mixture
from tests.learn.events.test_model import QUICK, SMALL, clicks, late


@pytest.fixture(scope="module")
def fitted():
    return kq.EventModel(**SMALL, epochs=2).fit(*clicks())


def survival(gap, mixture):
    return float(mixture.log_survival(torch.tensor(gap)).exp())


def test_gaps_given_silence_against_integrals():
    torch.manual_seed(0)
    found = Mixture(*torch.randn(2, 5, 3).double(), torch.rand(5, 3).double() + 0.2, 1e-6)
    whole = MixtureSameFamily(Categorical(logits=found.weights), LogNormal(found.mean, found.spread))
    after = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0]).double()
    left = 1 - whole.cdf(after)
    assert torch.allclose(found.log_survival(after).exp(), left, atol=1e-9)
    for share in (0.1, 0.5, 0.9):
        at = found.quantile(share, after)
        assert torch.allclose((whole.cdf(at) - whole.cdf(after)) / left, torch.full((5,), share).double(), atol=1e-6)
    means = found.average(after)
    for row in range(5):
        one = Mixture(*(part[row] for part in found[:3]), 1e-6)
        beyond = integrate.quad(survival, float(after[row]), np.inf, args=(one,))[0]
        assert float(means[row]) == pytest.approx(float(after[row]) + beyond / float(left[row]), rel=1e-4)
    assert torch.allclose(found.average(torch.zeros(5).double()), whole.mean, rtol=1e-5)
    far = found.quantile(0.5, torch.full((5,), 1e6).double())  # where the survival underflows
    assert bool(((far > 1e6) & far.isfinite()).all())


def test_silence_so_far_changes_the_time_left(fitted):
    events, times, groups = clicks()
    last = np.array([times[groups == group].max() for group in pd.unique(groups)])
    plain = fitted.predict_time(events, times, groups)
    assert np.allclose(fitted.predict_time(events, times, groups, now=last), plain, rtol=1e-6)
    thirds = fitted.predict_time(events, times, groups, quantiles=(0.2, 0.5, 0.8))
    assert np.allclose(thirds[:, 1], plain)
    assert (np.diff(thirds, axis=1) > 0).all()
    silent = last + 2 * plain  # P(gap > 2 medians) < 1/2: what is left counts from now, not from the last event
    later = fitted.predict_time(events, times, groups, now=silent)
    assert (later > 0).all()
    assert not np.allclose(later, plain, rtol=1e-2)
    assert (fitted.predict_time(events, times, groups, "mean", now=silent) > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"now": -1.0}, "now must not be before a group's last event"),
        ({"now": [1e9]}, "now must hold a time for each of 9 groups, got 1"),
        ({"now": np.datetime64("2020-01-01")}, "now must be numbers, like times, got dates"),
        ({"quantiles": [0.5, 1.0]}, "quantiles must be between 0 and 1"),
        ({"what": "mode"}, "what must be one of 'median', 'mean'"),
    ],
)
def test_bad_questions_about_time(fitted, options, message):
    with pytest.raises(ValueError, match=message):
        fitted.predict_time(*clicks(), **options)


def test_censoring_is_part_of_the_likelihood():
    # Gaps of 1, then silence for 50 after half of the groups' last events: only a censored fit can know of long gaps.
    rng = np.random.default_rng(0)
    gaps = rng.uniform(0.8, 1.2, size=(80, 4))
    times, groups, events = gaps.cumsum(1).ravel(), np.repeat(np.arange(80), 4), np.full(320, "beat")
    until = times[3::4] + 50.0
    options = {**SMALL, "epochs": 8, "lr": 1e-2, "validation_fraction": 0.2}
    silent = kq.EventModel(**options).fit(events, times, groups, until=until)
    plain = kq.EventModel(**options).fit(events, times, groups)
    long = [model.predict_time(events, times, groups, quantiles=[0.9]).mean() for model in (plain, silent)]
    assert long[0] < 2
    assert long[1] > 5  # one gap in four is longer than 50
    with pytest.raises(ValueError, match="until must not be before a group's last event"):
        kq.EventModel(**QUICK).fit(events, times, groups, until=0.0)


def test_a_single_type_has_times():
    rng = np.random.default_rng(0)
    times, groups = rng.uniform(1, 2, size=(20, 10)).cumsum(1).ravel(), np.repeat(np.arange(20), 10)
    data = np.full(200, "beat"), times, groups
    model = kq.EventModel(**QUICK).fit(*data)
    assert model.predict(*data).tolist() == ["beat"] * 20
    assert np.allclose(model.predict_proba(*data), 1)
    assert model.score(*data) == 1.0
    assert (model.predict_time(*data) > 0).all()


def test_unknown_types_count_as_events(fitted):
    events, times, groups = clicks()
    strange = events.astype("<U9")
    strange[[3, 50]] = "complain"
    with pytest.warns(UserWarning, match="in 2 of 200 rows: 'complain'; they count as an event of unknown type"):
        found = fitted.predict_proba(strange, times, groups)
    plain = fitted.predict_proba(events, times, groups)
    touched = np.isin(pd.unique(groups), groups[[3, 50]])
    assert np.allclose(found[~touched], plain[~touched], atol=1e-6)  # other groups do not change
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluation = fitted.evaluate(strange, times, groups)
    first = ~pd.Series(groups).duplicated().to_numpy()
    assert evaluation.unknown == int((~first[[3, 50]]).sum())
    assert evaluation.rows[0]["accuracy"] <= 1 - evaluation.unknown / evaluation.events


def test_a_search_over_parameters_keeps_groups():
    table = pd.DataFrame(dict(zip(("type", "when", "who"), late(20, 12), strict=True)))
    frame = table.sort_values("when")  # groups are interleaved
    search = GridSearchCV(kq.EventModel(**QUICK), {"lr": [1e-3]}, cv=GroupKFold(2), error_score="raise")
    search.fit(frame, groups=frame["who"])
    expected = kq.EventModel(**QUICK, lr=1e-3).fit(frame["type"], frame["when"], frame["who"])
    assert np.allclose(search.predict_proba(frame), expected.predict_proba(frame))
    with pytest.raises(ValueError, match="times must be given, unless events is a data frame"):
        kq.EventModel(**QUICK).fit(frame["type"])
    with pytest.warns(UserWarning, match="GridSearchCV passes them to its splitter, not to fit"):
        kq.EventModel(**QUICK).fit(table["type"], table["when"])
