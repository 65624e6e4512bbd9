"""The study of time: its simulation, what its arms see, and its readers."""

import lzma
from itertools import pairwise

import numpy as np
import pytest
from keyquery_studies import time as module
from keyquery_studies.common.events import read_badges, read_cdnow, read_retail
from keyquery_studies.time import ARMS, BASE, EXCITATION, ArmModel, simulate, size_of, split
from scipy.integrate import quad

RETAIL = """InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country
1,a,"A, LIGHT",2,12/1/2010 8:26,1.5,7,Here
1,b,B,1,12/1/2010 8:26,1.0,7,Here
2,a,A,100,12/3/2010 8:26,2.0,7,Here
C3,a,A,-1,12/4/2010 8:26,2.0,7,Here
4,a,A,1,12/1/2010 9:00,30.0,,Here
5,a,A,1,12/2/2010 9:00,30.0,8,Here
"""


def test_an_invoice_is_one_event_by_what_it_comes_to(tmp_path):
    path = tmp_path / "retail.csv.xz"
    path.write_bytes(lzma.compress(RETAIL.encode("latin1")))
    events = read_retail(path)
    assert events.types.tolist() == ["small", "large", "return", "middle"]  # 4, 200 and 30 in thirds
    assert events.groups.tolist() == [7, 7, 7, 8]
    assert np.allclose(np.diff(events.times[:3]), [2.0, 1.0])


def test_purchases_of_discs_and_badges(tmp_path):
    path = tmp_path / "cdnow.txt"
    path.write_text(" 00001 19970101  1  11.77\n 00001 19970103  5  60.00\n")
    events = read_cdnow(path)
    assert (events.types.tolist(), events.groups.tolist(), np.diff(events.times).tolist()) == (
        ["1", "more"],
        [1, 1],
        [2],
    )
    path = tmp_path / "badges.npz"
    np.savez(path, time=86_400 * np.arange(5.0), event=[1, 2, 1, 1, 2], offsets=[0, 3, 5])
    assert read_badges(path).groups.tolist() == [0, 0, 0, 1, 1]
    assert read_badges(path).times.tolist() == [0, 1, 2, 3, 4]


def test_files_that_are_no_such_files_are_named(tmp_path):
    path = tmp_path / "file"
    path.write_text("a,b\n1,2\n")
    for reader, message in ((read_retail, "must have columns CustomerID"), (read_cdnow, "holds no purchase")):
        with pytest.raises(ValueError, match=message):
            reader(path)
    path.write_text("1 1997 1\n")
    with pytest.raises(ValueError, match="line 1: expected customer, date, discs and dollars"):
        read_cdnow(path)
    np.savez(tmp_path / "a.npz", time=[1.0], event=[1], offsets=[0, 2])
    with pytest.raises(ValueError, match="offsets must rise from 0 to 1"):
        read_badges(tmp_path / "a.npz")


def test_the_simulation_has_the_intensities_of_its_process():
    """Waiting times are exponential in the integral of the intensity: it has mean 1 and standard deviation 1."""
    events = simulate(groups=40, length=30, seed=3)
    waits, likely = [], []
    for group in range(40):
        rows = np.flatnonzero(events.groups == group)
        raised = np.zeros(4)
        for now, later in pairwise(rows):
            raised = raised + EXCITATION[:, events.types[now]]
            gap = events.times[later] - events.times[now]
            waits.append(quad(lambda t, r=raised: (BASE + r * np.exp(-t)).sum(), 0, gap)[0])
            raised = raised * np.exp(-gap)
            rates = BASE + raised
            likely.append(rates[events.types[later]] / rates.sum())
    assert np.mean(waits) == pytest.approx(1, abs=3 / len(waits) ** 0.5)
    assert np.std(waits) == pytest.approx(1, abs=0.1)
    assert -np.log(likely).mean() < 1.25 < np.log(4)


def test_the_arms_have_equally_many_parameters_and_see_what_they_should():
    events = simulate(groups=12, length=8)
    sizes, sees = {}, {}
    for arm, (gap_input, kernel) in ARMS.items():
        model = ArmModel(time="mercer" if kernel else "positions", epochs=1, random_state=0, device="cpu")
        model.gap_input = gap_input
        model.fit(*events)
        sizes[arm] = size_of(model.network_)
        later = np.where(np.arange(len(events.times)) % 8 == 3, events.times + 1e-3, events.times)  # order unchanged
        changed = model.predict_proba(events.types, later, events.groups)
        sees[arm] = not np.array_equal(changed, model.predict_proba(*events))
    assert all(abs(size - sizes["both"]) <= 33 for size in sizes.values())  # half of a unit of the MLP
    assert sees == {"order": False, "gap": True, "kernel": True, "both": True}


def test_each_arm_is_trained_at_its_best_rate_on_groups_split_apart(study, tmp_path, monkeypatch):
    monkeypatch.setattr("keyquery_studies.common.rates.EXTENSIONS", 0)
    monkeypatch.setattr(module, "simulate", lambda: simulate(groups=15, length=3))
    reading = study("time", "--epochs", 1, "--seed", 0, "--seed", 1, "--rate", 1e-3, "--rate", 4e-3)
    assert sorted((row["arm"], row["seed"]) for row in reading.arms) == sorted((arm, s) for arm in ARMS for s in (0, 1))
    assert all(len({row["lr"] for row in reading.arms if row["arm"] == arm}) == 1 for arm in ARMS)
    assert len(reading.contrasts()) == 6
    [path] = (tmp_path / "out").glob("hawkes-*.npz")
    learned, test = split(path)
    assert not set(learned.groups) & set(test.groups)
    assert len(set(test.groups)) == 3
