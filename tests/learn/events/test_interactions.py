"""Which events change what comes next, and when: exact where the truth is known, recovered from a Hawkes process."""

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery import pages
from keyquery.learn.events.interactions import Interactions, compare, histories_of, inserted
from keyquery.learn.events.network import Mixture
from keyquery.learn.events.windows import Batch

# Rates without a past: type 0 excites type 1, and type 2 is noise.
BASE, TAU = np.array([0.15, 0.1, 1.0]), 2.0


def simulate(groups, until, bound, seed=0):
    """Events (events, times, groups) of Hawkes processes up to time `until`, by thinning; no rate is ever `bound`."""
    rng, rows = np.random.default_rng(seed), []
    for group in range(groups):
        now, times, types = 0.0, [], []
        while (now := now + rng.exponential(1 / bound)) < until:
            total = np.cumsum(rates(now, np.array(times), np.array(types, dtype=int)))
            assert total[-1] < bound
            drawn = rng.random() * bound
            if drawn < total[-1]:
                times.append(now)
                types.append(int(np.searchsorted(total, drawn)))
        rows += [(kind, when, group) for kind, when in zip(types, times, strict=True)]
    return tuple(np.array(column) for column in zip(*rows, strict=True))


def rates(now, times, types):
    """The rates (types,) at a time, given the events before."""
    added = kernel(now - times[types == 0]).sum() if len(times) else 0
    return BASE + np.array([0, added, 0])


def kernel(lags):
    """Each event of type 0 makes type 1 likely TAU later."""
    return np.exp(-0.5 * ((lags - TAU) / (TAU / 6)) ** 2)


def truth(batch):
    """What follows, of the process itself: rates at the time of the event to predict."""
    found = []
    for types, times, when in zip(batch.types, batch.times, batch.next_times[:, -1], strict=True):
        past = times < when
        found.append(rates(float(when), times[past].numpy(), types[past].numpy()))
    flat = torch.zeros(len(found), 1)
    return torch.tensor(np.array(found)).log(), Mixture(flat, flat, flat + 1, 1e-3)


def history(types, times, next_time, inputs=None):
    """A batch of one history and the time of what follows it."""
    types, times = torch.tensor([types]), torch.tensor([times], dtype=torch.float64)
    real, following = torch.ones_like(types, dtype=torch.bool), torch.full_like(times, next_time)
    return Batch(types, times, real, types, following, real, inputs)


def test_of_a_process_that_is_known_it_is_the_kernel():
    lags = torch.tensor([0.5, 1.0, 2.0, 8.0], dtype=torch.float64)
    effects = compare(truth, [history([1], [-20.0], 0.0)] * 2, lags, 3, True)
    change, added = np.array(effects["change"]), kernel(lags.numpy())
    assert np.allclose(change[0, 1], np.log((0.1 + added) / (1.25 + added) / (0.1 / 1.25)), atol=1e-9)
    assert np.allclose(change[0, 2], np.log(1.25 / (1.25 + added)), atol=1e-9)
    assert np.allclose(change[1:], 0, atol=1e-9)
    assert np.allclose(effects["error"], 0)
    assert effects["contexts"] == 2


def test_the_event_more_stands_where_it_should():
    past = history([0, 1, 0], [-4.0, -1.0, 0.0], 2.0, torch.tensor([[[1.0], [2.0], [3.0]]]))
    batch = inserted(past, torch.tensor([0.5, 1.0, 3.0]).double(), 2, False)
    assert batch.types.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0]]
    assert batch.times[0].tolist() == [-4.0, -1.0, -0.5, 0.0]
    assert batch.times[5].tolist() == [-4.0, -3.0, -1.0, 0.0]
    assert batch.inputs[0].flatten().tolist() == [1.0, 2.0, 0.0, 3.0]
    assert batch.counted.tolist() == [[False, False, False, True]] * 6
    target = inserted(past, torch.tensor([0.5, 2.5]).double(), 2, True)
    assert target.times.tolist()[:2] == [[-4.0, -1.0, 0.0, 1.5], [-4.0, -1.0, -0.5, 0.0]]
    assert target.types[2].tolist() == [0, 1, 0, 1]


def test_means_are_over_histories_that_reach_back_to_the_longest_lag():
    short, long = (history([1, 1], [-far, 0.0], 0.1) for far in (2.0, 9.0))
    assert compare(truth, [short, long], torch.tensor([1.0, 5.0]).double(), 3, True)["contexts"] == 1
    with pytest.raises(ValueError, match="lags must not exceed the longest history, got 50 median gaps"):
        compare(truth, [short], torch.tensor([50.0]).double(), 3, True)


@pytest.mark.slow
def test_the_lag_of_a_hawkes_process_is_recovered():
    data = simulate(200, 100.0, bound=9.0)
    options = {"width": 16, "window": 30, "epochs": 20, "lr": 5e-3, "gap_weight": 0.1, "patience": 20}
    model = kq.EventModel(information="target_time", **options, random_state=0, device="cpu").fit(*data)
    assert len(model.interactions(*data).lags) == 16
    lags = np.geomspace(TAU / 8, 2.5 * TAU, 20)
    found = model.interactions(*data, lags=lags)
    change = np.array(found.change)[0, 1]
    best = found.strongest(1)[0]
    assert (best["past"], best["next"]) == (0, 1)
    histories = histories_of(model._windows(model._stream(*data)), model.window)
    scaled = [h._replace(times=h.times * model.scale_, next_times=h.next_times * model.scale_) for h in histories]
    exact = np.array(compare(truth, scaled, torch.from_numpy(lags), 3, True)["change"])[0, 1]
    assert lags[change.argmax()] == pytest.approx(TAU, rel=0.2)
    assert lags[exact.argmax()] == pytest.approx(TAU, rel=0.1)


@pytest.fixture
def reading():
    rng = np.random.default_rng(0)
    change = rng.normal(size=(3, 3, 5)) / 10
    change[0, 2] = [0.1, 0.4, 1.5, 0.3, 0.0]
    change[1, 1, 0] = 9.0
    error = np.full((3, 3, 5), 0.05)
    error[1, 1, 0] = 5.0
    return Interactions(
        types=["buy", "look", "leave"],
        lags=[60.0, 600.0, 3600.0, 86400.0, 864000.0],
        clock="dates",
        information="past",
        contexts=9,
        change=change.tolist(),
        error=error.tolist(),
        sooner=np.zeros((3, 5)).tolist(),
    )


def test_the_strongest_are_those_that_are_sure(reading):
    best = reading.strongest(2)
    assert (best[0]["past"], best[0]["next"], best[0]["lag"]) == ("buy", "leave", 3600.0)
    assert (best[1]["past"], best[1]["next"]) != ("look", "look")
    rows = reading.to_frame()
    assert rows.loc[(rows.past == "buy") & (rows.next == "leave") & (rows.lag == 3600), "change"].item() == 1.5
    assert kq.Reading.load(reading.to_json()) == reading


def test_it_is_drawn(reading, tmp_path):
    figure = reading.plot(pairs=3)
    titles = [axis.get_title("left") for one in figure.subfigs for axis in one.axes]
    assert "buy → leave" in titles
    panel = next(a for one in figure.subfigs for a in one.axes if a.get_title("left") == "buy → leave")
    assert panel.lines[-1].get_ydata().tolist() == [0.1, 0.4, 1.5, 0.3, 0.0]
    assert panel.lines[-1].get_xdata()[2] == pytest.approx(1.0)  # in hours
    assert "time before the last event (h)" in [text.get_text() for one in figure.subfigs for text in one.texts]
    grid = figure.subfigs[0].axes[0].images[0].get_array()
    assert grid[0, 2] == 1.5
    assert pages.picture_bytes(tmp_path / "pairs.svg", reading).startswith(b"<?xml")
