"""EventModel: what it learns, what it cannot know, what it keeps, and what it says of bad input."""

import json
import warnings
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.model_selection import GridSearchCV, GroupKFold

import keyquery as kq

SMALL = {"width": 16, "heads": 2, "window": 20, "device": "cpu", "random_state": 0}
QUICK = {**SMALL, "epochs": 1}


def late(groups=60, length=30, ahead=0, seed=0):
    """Events after which "long" comes where the last gap was above 1, and else "short"; with `ahead` the coming gap."""
    rng = np.random.default_rng(seed)
    gaps = rng.uniform(0.05, 2, size=(groups, length))
    types = np.array(["short", "long"])[(np.roll(gaps, 1 - ahead, axis=1) > 1).astype(int)]
    return types.ravel(), gaps.cumsum(1).ravel(), np.repeat(np.arange(groups), length)


def clicks(seed=0):
    rng = np.random.default_rng(seed)
    types, who = rng.choice(["buy", "look", "leave"], 200), rng.integers(0, 9, 200)
    return types, np.sort(rng.exponential(size=200).cumsum()), who


@pytest.fixture(scope="module")
def fitted():
    return kq.EventModel(**SMALL, epochs=2).fit(*clicks())


@pytest.mark.parametrize("time", ["mercer", "bochner"])
@pytest.mark.slow
def test_what_depends_on_elapsed_time_is_learned_with_times_alone(time):
    options = {**SMALL, "epochs": 12, "lr": 1e-2}
    data, new = late(), late(seed=1)
    timed = kq.EventModel(time=time, **options).fit(*data).evaluate(*new)
    assert timed.accuracy > 0.9
    blind = kq.EventModel(time="positions", **options).fit(*data).evaluate(*new)
    assert blind.accuracy < 0.58
    assert timed.nll_type < blind.nll_type - 0.3


def test_the_time_of_the_target_helps_only_where_it_is_given():
    """The next type is told by the gap that leads to it: who knows only the past can but guess."""
    options = {**SMALL, "epochs": 12, "lr": 1e-2}
    data, new = late(ahead=1), late(ahead=1, seed=1)
    assert kq.EventModel(**options).fit(*data).evaluate(*new).accuracy < 0.58
    target = kq.EventModel(information="target_time", **options).fit(*data)
    evaluation = target.evaluate(*new)
    assert evaluation.accuracy > 0.9
    assert evaluation.rows[0]["information"] == evaluation.information == "target_time"
    last = np.array([new[1][new[2] == group].max() for group in range(60)])
    assert np.mean(target.predict(*new, at=last + 0.3) == "short") > 0.9
    assert np.mean(target.predict(*new, at=last + 1.7) == "long") > 0.9
    drawn = target.sample(*new, n=1, random_state=0)
    assert np.mean((drawn.events == "long") == (drawn.times - last > 1)) > 0.85


def test_gaps_are_foretold():
    gaps = np.tile([1.0, 5.0], 300)  # a short gap follows every "a"
    types, who = np.tile(["b", "a"], 300), np.repeat(np.arange(20), 30)
    when = gaps.cumsum() + np.random.default_rng(0).normal(size=600) / 50
    model = kq.EventModel(**SMALL, epochs=15, lr=1e-2).fit(types, when, who)
    keep = np.tile(np.arange(30) < 29, 20)
    for what in ("median", "mean"):
        assert np.allclose(model.predict_time(types, when, who, what), 1.0, rtol=0.2)
        assert np.allclose(model.predict_time(types[keep], when[keep], who[keep], what), 5.0, rtol=0.2)
    drawn = model.sample(types, when, who, n=4, random_state=0)
    assert drawn.events[:4].tolist() == ["b", "a", "b", "a"]
    assert drawn.groups.tolist() == np.repeat(np.arange(20), 4).tolist()
    first = drawn.times.reshape(20, 4) - when.reshape(20, 30)[:, -1:]
    assert np.median(first[:, 0]) == pytest.approx(1.0, rel=0.2)
    assert np.median(np.diff(first, axis=1)[:, 0]) == pytest.approx(5.0, rel=0.2)


def test_events_at_one_time_are_likely_and_finite():
    rng = np.random.default_rng(0)
    gaps = rng.exponential(size=600) * rng.integers(0, 2, 600)  # half of them 0
    types, who = rng.choice(["a", "b"], 600), np.repeat(np.arange(20), 30)
    model = kq.EventModel(**SMALL, epochs=8, lr=5e-3).fit(types, gaps.cumsum(), who)
    after = np.diff(model.sample(types, gaps.cumsum(), who, n=30, random_state=1).times.reshape(20, 30), axis=1)
    assert (after >= 0).all()
    assert np.mean(after == 0) == pytest.approx(0.5, abs=0.12)
    assert np.isfinite(model.evaluate(types, gaps.cumsum(), who).nll_gap)


@pytest.mark.slow
def test_seasons_are_seen_with_a_calendar():
    def pairs(seed):
        """Two events each: the second is of the season in which the first was."""
        rng = np.random.default_rng(seed)
        first = rng.uniform(0, 60, 800) + 1e9
        second = np.where(first % 6 < 3, "summer", "winter")
        times = np.stack((first, first + rng.uniform(0.5, 8, 800)), 1)
        return np.stack((np.full(800, "start"), second), 1).ravel(), times.ravel(), np.repeat(np.arange(800), 2)

    options = {**SMALL, "epochs": 10, "lr": 2e-2}
    seasoned = kq.EventModel(calendar=True, **options).fit(*pairs(0))
    assert seasoned.score(*pairs(1)) > 0.85
    assert kq.EventModel(**options).fit(*pairs(0)).score(*pairs(1)) < 0.6
    types, times, who = pairs(2)
    assert np.mean(seasoned.predict(types[::2], times[::2], who[::2]) == types[1::2]) > 0.85


# What a prediction depends on


@pytest.mark.parametrize("information", ["past", "target_time"])
def test_other_groups_reach_nothing(information):
    model = kq.EventModel(**{**QUICK, "information": information}).fit(*clicks())
    types, times, who = clicks(seed=1)
    when = times.max() + np.arange(9.0) if information == "target_time" else None
    together = model.predict_proba(types, times, who, when)
    for number, group in enumerate(pd.unique(who)):
        rows = who == group
        alone = model.predict_proba(types[rows], times[rows], at=None if when is None else when[number : number + 1])
        assert np.allclose(alone[0], together[number], atol=1e-6)


def test_only_the_last_window_and_no_absolute_time_is_seen(fitted):
    types, times, _ = clicks(seed=2)
    expected = fitted.predict_proba(types, times)
    assert np.allclose(fitted.predict_proba(types, times + 2.0**30), expected, atol=1e-5)
    types[:-20] = "buy"
    assert np.array_equal(fitted.predict_proba(types, times), expected)
    types[-20] = "leave" if types[-20] != "leave" else "buy"
    assert not np.allclose(fitted.predict_proba(types, times), expected)


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


def test_censoring_is_part_of_the_likelihood():
    # Gaps of 1, then silence for 50 after half of the groups' last events: only a censored fit can know of long gaps.
    rng = np.random.default_rng(0)
    gaps = rng.uniform(0.8, 1.2, size=(80, 4))
    data = np.full(320, "beat"), gaps.cumsum(1).ravel(), np.repeat(np.arange(80), 4)
    options = {**SMALL, "epochs": 8, "lr": 1e-2, "validation_fraction": 0.2}
    models = [kq.EventModel(**options).fit(*data, until=until) for until in (None, data[1][3::4] + 50.0)]
    plain, silent = (model.predict_time(*data, quantiles=[0.9]) for model in models)
    assert plain.mean() < 2
    assert silent.mean() > 5  # one gap in four is longer than 50
    assert np.allclose(models[0].predict_proba(*data), 1)  # of a single type


def test_unknown_types_count_as_events(fitted):
    events, times, groups = clicks()
    strange = events.astype("<U9")
    strange[[3, 50]] = "complain"
    with pytest.warns(UserWarning, match="in 2 of 200 rows: 'complain'; they count as an event of unknown type"):
        predicted = fitted.predict_proba(strange, times, groups)
    touched = np.isin(pd.unique(groups), groups[[3, 50]])
    plain = fitted.predict_proba(events, times, groups)
    assert np.allclose(predicted[~touched], plain[~touched], atol=1e-6)  # other groups do not change
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluation = fitted.evaluate(strange, times, groups)
    first = ~pd.Series(groups).duplicated().to_numpy()
    assert evaluation.unknown == int((~first[[3, 50]]).sum())
    assert evaluation.rows[0]["accuracy"] <= 1 - evaluation.unknown / evaluation.events


def test_baselines_are_counts_of_the_training_data():
    types, times, who = clicks()
    new_types, new_times, new_who = clicks(seed=3)
    evaluation = kq.EventModel(**QUICK).fit(types, times, who).evaluate(new_types, new_times, new_who)

    def pairs(kinds, groups):
        return [p for g in set(groups) for p in zip(kinds[groups == g][:-1], kinds[groups == g][1:], strict=True)]

    learned, tested = pairs(types, who), pairs(new_types, new_who)
    singles, doubles = Counter(b for _, b in learned), Counter(learned)
    names = sorted(singles)
    common = max(names, key=singles.get)
    model, majority, markov = evaluation.rows
    assert evaluation.events == len(tested) == 200 - evaluation.firsts
    assert majority["accuracy"] == pytest.approx(np.mean([b == common for _, b in tested]))
    shares = {b: (singles[b] + 1) / (len(learned) + 3) for b in names}
    assert majority["nll_type"] == pytest.approx(-np.mean([np.log(shares[b]) for _, b in tested]))
    best = {a: max(names, key=lambda b: doubles[a, b]) for a in names}
    assert markov["accuracy"] == pytest.approx(np.mean([best[a] == b for a, b in tested]))
    rows = {a: sum(doubles[a, b] for b in names) for a in names}
    likely = [np.log((doubles[a, b] + 1) / (rows[a] + 3)) for a, b in tested]
    assert markov["nll_type"] == pytest.approx(-np.mean(likely))
    assert model["by"] == "mercer"
    assert kq.Reading.load(evaluation.to_json()) == evaluation


# Users' columns, and files


def test_dates_go_in_and_come_out(fitted):
    types, times, who = clicks()
    dates = pd.Timestamp("2024-01-01", tz="Europe/Paris") + pd.to_timedelta(times, unit="s")
    table = pd.DataFrame({"type": types, "when": dates, "user": [f"user {g}" for g in who]})
    model = kq.EventModel(**SMALL, epochs=2).fit(table)
    assert np.allclose(model.predict_proba(table), fitted.predict_proba(types, times, who), atol=1e-3)
    assert model.scale_ == pytest.approx(fitted.scale_, rel=1e-4)
    drawn = model.sample(table, n=2, random_state=0)
    assert drawn.times.dtype == np.dtype("M8[us]")
    assert (drawn.times > np.datetime64("2023-12-31T23:00")).all()
    assert drawn.groups[0] == table["user"][0]
    with pytest.raises(ValueError, match="times must be dates, as this model was fitted on, got numbers"):
        model.predict(types, times, who)


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


@pytest.mark.parametrize("information", ["past", "target_time"])
def test_it_is_saved_bit_for_bit(tmp_path, information):
    data = clicks()
    model = kq.EventModel(**{**QUICK, "information": information}, time="bochner").fit(*data)
    model.save(tmp_path / "model.safetensors")
    again = kq.EventModel.load(tmp_path / "model.safetensors", device="cpu")
    assert again.get_params() == model.get_params()
    assert again.evaluate(*data).rows == model.evaluate(*data).rows
    assert model.score(*data) == model.evaluate(*data).accuracy
    assert np.array_equal(again.predict_time(*data), model.predict_time(*data))
    assert again.interactions(*data).to_json() == model.interactions(*data).to_json()
    assert again.history_ == model.history_


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale": 0.0}, "scale must be above 0, got 0.0"),
        ({"scale": None}, "scale must be a number"),
        ({"clock": "moons"}, "clock must be one of 'numbers', 'dates', 'spans', got 'moons'"),
        ({"log_gaps": [1.0]}, "not enough values to unpack"),
        ({"log_gaps": [0.0, 0.0]}, "deviation of log_gaps must be above 0, got 0.0"),
        ({"classes": {"dtype": "<U5", "labels": ["look", "leave", "buy"]}}, "labels must be one or more, in rising"),
        ({"start": ...}, "missing 'start'"),
        ({"params": {"width": 200_000}}, ".*does not match a network with these parameters"),  # huge
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
        stored = tensors if isinstance(value, torch.Tensor) else facts
        stored[name] = stored[name] | value if name == "params" else value
        if value is ...:
            del stored[name]
    save_file(tensors, path, {"keyquery": json.dumps(facts)})
    with pytest.raises(ValueError, match=f"is not a complete EventModel file: ({said})"):
        kq.EventModel.load(path, device="cpu")


# Bad input


@pytest.mark.parametrize(
    ("options", "data", "said"),
    [
        ({"time": "clock"}, {}, "time must be one of 'mercer', 'bochner', 'positions', got 'clock'"),
        ({"time": "positions", "information": "target_time"}, {}, 'information="target_time" needs times'),
        ({"heads": 3}, {}, "heads must divide width: 3 does not divide 16"),
        ({"window": 1}, {}, "window must be at least 2, got 1"),
        ({"dropout": 1.0}, {}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"gap_weight": -1.0}, {}, "gap_weight must be at least 0, got -1.0"),
        ({}, {"events": "ab", "times": [1.0, 2.0]}, "events must be a column"),
        ({}, {"events": ["a", "b"], "times": [1.0, 2.0], "groups": [0, 1]}, r"nothing to train on in 2 group\(s\)"),
        ({}, {"events": ["a", "b"], "times": [1.0, 1.0]}, "no group has two different times"),
        ({}, {"until": 0.0}, "until must not be before a group's last event"),
    ],
)
def test_what_cannot_be_fitted_is_told(options, data, said):
    columns = dict(zip(("events", "times", "groups"), clicks(), strict=True))
    with pytest.raises(ValueError, match=said):
        kq.EventModel(**{**QUICK, **options}).fit(**(data if "events" in data else columns | data))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda m: m.score(["buy"], [1.0]), "nothing to predict: no event that follows another"),
        (lambda m: m.predict(*clicks(), at=np.ones(9)), r'at must .*"target_time" only: .*information="past"'),
        (lambda m: m.sample(*clicks(), n=0), "n must be at least 1, got 0"),
        (lambda m: m.predict_time(*clicks(), now=-1.0), "now must not be before a group's last event; 9 of 9 are"),
        (lambda m: m.predict_time(*clicks(), now=[1e9]), "now must hold a time for each of 9 groups, got 1"),
        (lambda m: m.predict_time(*clicks(), now=np.datetime64("2020-01-01")), "now must be numbers, .* got dates"),
        (lambda m: m.predict_time(*clicks(), quantiles=[0.5, 1.0]), "quantiles must be between 0 and 1"),
        (lambda m: m.predict_time(*clicks(), what="mode"), "what must be one of 'median', 'mean'"),
        (lambda m: m.predict_end(*clicks()), "does not know ends: fit it with ended="),
        (lambda m: m.interactions(*clicks(), lags=[0.0]), "lags must be a list of numbers above 0"),
    ],
)
def test_bad_questions_are_told(fitted, ask, said):
    with pytest.raises(ValueError, match=said):
        ask(fitted)
