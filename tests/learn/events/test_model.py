"""EventModel: what it learns, what it cannot know, and what it says of bad input."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from torch.distributions import Categorical, LogNormal, MixtureSameFamily

import keyquery as kq
from keyquery.learn.events.network import KNOTS, EventNetwork, Mixture, Since

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


def mixture(k=3, floor=0.01):
    return Mixture(*torch.randn(2, 5, k).double(), torch.rand(5, k).double() + 0.2, floor)


def test_gaps_have_the_likelihood_of_a_mixture():
    found = mixture()
    expected = MixtureSameFamily(Categorical(logits=found.weights), LogNormal(found.mean, found.spread))
    gaps = torch.tensor([0.02, 0.5, 1.0, 7.0, 300.0]).double()
    assert torch.allclose(found.log_density(gaps), expected.log_prob(gaps), atol=1e-9)
    below = expected.cdf(torch.full((5,), 0.01).double()).log()
    for tiny in (0.0, 0.004, 0.01):  # at the floor and below it only the probability of being there counts
        assert torch.allclose(found.log_density(torch.full((5,), tiny).double()), below, rtol=1e-4)
    for share in (0.2, 0.5, 0.9):
        at = found._replace(floor=1e-6).quantile(share)
        assert torch.allclose(expected.cdf(at), torch.full((5,), share).double(), atol=1e-6)


def test_gaps_that_are_drawn_have_it_too():
    found = Mixture(*(part[:1].expand(20_000, -1) for part in mixture()[:3]), 0.3)
    drawn = found.draw(torch.Generator().manual_seed(0)).double()
    one = MixtureSameFamily(Categorical(logits=found.weights[0]), LogNormal(found.mean[0], found.spread[0]))
    for at in (0.3, 0.6, 1.0, 3.0):
        assert float((drawn <= at).double().mean()) == pytest.approx(float(one.cdf(torch.tensor(at))), abs=0.015)
    assert not ((drawn > 0) & (drawn <= 0.3)).any()  # at the floor is at the same time


def test_a_gap_is_seen_through_lines_between_quantiles():
    gaps = np.random.default_rng(0).lognormal(0, 3, 2000) * (np.arange(2000) % 4 > 0)  # a quarter at one time
    since, asked = Since(3, floor=1e-4), np.array([0.0, 1e-9, 0.01, 1.0, 30.0, 1e9])
    since.begin(gaps)
    found = since(torch.from_numpy(asked).unsqueeze(0))[0].detach().numpy()
    knots = since.knots.double().numpy()
    assert (np.diff(knots) > 0).all()
    assert np.exp(knots[len(knots) // 2]) == pytest.approx(np.median(gaps), rel=0.15)
    heights = np.concatenate((np.zeros((3, 1)), since.map.weight.detach().double().cumsum(1).numpy()), 1)
    heights += since.map.bias.detach().double().numpy()[:, None]
    assert heights.shape == (3, KNOTS)
    for row, height in zip(found.T, heights, strict=True):
        assert np.allclose(row, np.interp(np.log(np.maximum(asked, 1e-4)), knots, height), atol=1e-5)


@pytest.mark.parametrize("time", ["mercer", "bochner"])
@pytest.mark.slow
def test_what_depends_on_elapsed_time_is_learned_with_times_alone(time):
    options = {**SMALL, "epochs": 12, "lr": 1e-2}
    data, new = late(), late(seed=1)
    found = kq.EventModel(time=time, **options).fit(*data).evaluate(*new)
    assert found.accuracy > 0.9
    blind = kq.EventModel(time="positions", **options).fit(*data).evaluate(*new)
    assert blind.accuracy < 0.58
    assert found.nll_type < blind.nll_type - 0.3
    assert {row["information"] for row in found.rows} == {"past"}


def test_the_time_of_the_target_helps_only_where_it_is_given():
    """The next type is told by the gap that leads to it: who knows only the past can but guess."""
    options = {**SMALL, "epochs": 12, "lr": 1e-2}
    data, new = late(ahead=1), late(ahead=1, seed=1)
    past = kq.EventModel(**options).fit(*data)
    assert past.evaluate(*new).accuracy < 0.58
    target = kq.EventModel(information="target_time", **options).fit(*data)
    found = target.evaluate(*new)
    assert found.accuracy > 0.9
    assert found.rows[0]["information"] == found.information == "target_time"
    last = np.array([new[1][new[2] == group].max() for group in range(60)])
    assert np.mean(target.predict(*new, at=last + 0.3) == "short") > 0.9
    assert np.mean(target.predict(*new, at=last + 1.7) == "long") > 0.9
    drawn = target.sample(*new, n=1, random_state=0)
    assert np.mean((drawn.events == "long") == (drawn.times - last > 1)) > 0.85


@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("how", ["concatenated", "additive", "interaction"])
def test_nothing_that_comes_later_reaches_a_prediction(how, targeted):
    network = EventNetwork(4, 16, 2, 2, "mercer", how, targeted=targeted).eval()
    types, times = torch.randint(0, 4, (3, 9)), torch.rand(3, 9).double().cumsum(1)
    following, real = times + torch.rand(3, 9).double(), torch.ones(3, 9, dtype=torch.bool)
    logits, gaps = network(types, times, real, following)
    other, later, after = types.clone(), times.clone(), following.clone()
    other[:, 5:], later[:, 5:] = 3 - other[:, 5:], later[:, 5:] + 1.7
    after[:, 4:] += 2.9  # the time of the target of event 4, and those after it
    new_logits, new_gaps = network(other, later, real, after)
    sees = 4 if targeted else 5  # with target_time, only the type of the event at that time does
    assert torch.equal(new_logits[:, :sees], logits[:, :sees])
    assert torch.equal(new_logits[:, 4], logits[:, 4]) is not targeted
    assert not torch.equal(new_logits[:, 5], logits[:, 5])
    for new, old in zip(new_gaps[:3], gaps[:3], strict=True):  # of the gap it is never seen
        assert torch.equal(new[:, :5], old[:, :5])


@pytest.mark.parametrize("information", ["past", "target_time"])
def test_padding_and_other_groups_reach_nothing(information):
    model = kq.EventModel(**{**QUICK, "information": information}).fit(*clicks())
    types, times, who = clicks(seed=1)
    when = times.max() + np.arange(9.0) if information == "target_time" else None
    together = model.predict_proba(types, times, who, when)
    order = pd.unique(who)
    for number, group in enumerate(order):
        own = who == group
        alone = model.predict_proba(types[own], times[own], at=None if when is None else when[number : number + 1])
        assert np.allclose(alone[0], together[number], atol=1e-6)
    network, real = model.network_, torch.ones(1, 6, dtype=torch.bool)
    real[:, 4:] = False
    codes, at = torch.randint(0, 3, (1, 6)), torch.rand(1, 6).double().cumsum(1)
    first = network(codes, at, real, at + 1)[0][:, :4]
    codes[:, 4:], at[:, 4:] = 2 - codes[:, 4:], 1e6
    assert torch.allclose(network(codes, at, real, at + 1)[0][:, :4], first, atol=1e-6)


def test_only_the_last_window_and_no_absolute_time_is_seen(fitted):
    types, times, _ = clicks(seed=2)
    expected = fitted.predict_proba(types, times)
    assert np.allclose(fitted.predict_proba(types, times + 2.0**30), expected, atol=1e-5)
    types[:-20] = "buy"
    assert np.array_equal(fitted.predict_proba(types, times), expected)
    types[-20] = "leave" if types[-20] != "leave" else "buy"
    assert not np.allclose(fitted.predict_proba(types, times), expected)


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
    asked = types[::2], times[::2], who[::2]
    assert np.mean(seasoned.predict(*asked) == types[1::2]) > 0.85


def test_baselines_are_counts_of_the_training_data():
    types, times, who = clicks()
    new_types, new_times, new_who = clicks(seed=3)
    found = kq.EventModel(**QUICK).fit(types, times, who).evaluate(new_types, new_times, new_who)

    def pairs(kinds, groups):
        return [p for g in set(groups) for p in zip(kinds[groups == g][:-1], kinds[groups == g][1:], strict=True)]

    learned, asked = pairs(types, who), pairs(new_types, new_who)
    singles, doubles = Counter(b for _, b in learned), Counter(learned)
    names = sorted(singles)
    common = max(names, key=singles.get)
    model, majority, markov = found.rows
    assert found.events == len(asked) == 200 - found.firsts
    assert majority["accuracy"] == pytest.approx(np.mean([b == common for _, b in asked]))
    shares = {b: (singles[b] + 1) / (len(learned) + 3) for b in names}
    assert majority["nll_type"] == pytest.approx(-np.mean([np.log(shares[b]) for _, b in asked]))
    best = {a: max(names, key=lambda b: doubles[a, b]) for a in names}
    assert markov["accuracy"] == pytest.approx(np.mean([best[a] == b for a, b in asked]))
    rows = {a: sum(doubles[a, b] for b in names) for a in names}
    likely = [np.log((doubles[a, b] + 1) / (rows[a] + 3)) for a, b in asked]
    assert markov["nll_type"] == pytest.approx(-np.mean(likely))
    assert model["by"] == "mercer"
    assert kq.Reading.load(found.to_json()) == found


def test_events_at_one_time_are_likely_and_finite():
    rng = np.random.default_rng(0)
    gaps = rng.exponential(size=600) * rng.integers(0, 2, 600)  # half of them 0
    types, who = rng.choice(["a", "b"], 600), np.repeat(np.arange(20), 30)
    model = kq.EventModel(**SMALL, epochs=8, lr=5e-3).fit(types, gaps.cumsum(), who)
    drawn = model.sample(types, gaps.cumsum(), who, n=30, random_state=1)
    after = np.diff(drawn.times.reshape(20, 30), axis=1)
    assert (after >= 0).all()
    assert np.mean(after == 0) == pytest.approx(0.5, abs=0.12)
    assert np.isfinite(model.evaluate(types, gaps.cumsum(), who).nll_gap)


def test_gaps_are_foretold():
    gaps = np.tile([1.0, 5.0], 300)  # a short gap follows every "a"
    types, who = np.tile(["b", "a"], 300), np.repeat(np.arange(20), 30)
    when = gaps.cumsum() + np.random.default_rng(0).normal(size=600) / 50
    model = kq.EventModel(**SMALL, epochs=15, lr=1e-2).fit(types, when, who)
    for what in ("median", "mean"):
        after_a = model.predict_time(types, when, who, what)
        assert np.allclose(after_a, 1.0, rtol=0.2)
        keep = np.tile(np.arange(30) < 29, 20)
        assert np.allclose(model.predict_time(types[keep], when[keep], who[keep], what), 5.0, rtol=0.2)
    drawn = model.sample(types, when, who, n=4, random_state=0)
    assert drawn.events[:4].tolist() == ["b", "a", "b", "a"]
    assert drawn.groups.tolist() == np.repeat(np.arange(20), 4).tolist()
    first = drawn.times.reshape(20, 4) - when.reshape(20, 30)[:, -1:]
    assert np.median(first[:, 0]) == pytest.approx(1.0, rel=0.2)
    assert np.median(np.diff(first, axis=1)[:, 0]) == pytest.approx(5.0, rel=0.2)


def test_dates_go_in_and_come_out(fitted):
    types, times, who = clicks()
    dates = pd.Timestamp("2024-01-01", tz="Europe/Paris") + pd.to_timedelta(times, unit="s")
    table = pd.DataFrame({"type": types, "when": dates, "user": [f"user {g}" for g in who]})
    model = kq.EventModel(**{**SMALL, "epochs": 2}).fit(table["type"], table["when"], table["user"])
    assert np.allclose(
        model.predict_proba(table["type"], table["when"], table["user"]),
        fitted.predict_proba(types, times, who),
        atol=1e-3,
    )
    assert model.scale_ == pytest.approx(fitted.scale_, rel=1e-4)
    drawn = model.sample(table["type"], table["when"], table["user"], n=2, random_state=0)
    assert drawn.times.dtype == np.dtype("M8[us]")
    assert (drawn.times > np.datetime64("2023-12-31T23:00")).all()
    assert drawn.groups[0] == table["user"][0]
    with pytest.raises(ValueError, match="times must be dates, as this model was fitted on, got numbers"):
        model.predict(types, times, who)


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
