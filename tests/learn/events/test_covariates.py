"""Event models with covariates, weights and ends of groups."""

import numpy as np
import pandas as pd
import pytest

import keyquery as kq
from keyquery.learn.events.covariates import CovariateCode, Described
from keyquery.learn.inputs.tables import columns_of
from tests.learn.events.test_model import QUICK, SMALL, late

LEARNED = {**SMALL, "epochs": 20, "lr": 1e-2}


def priced(groups=60, length=12, seed=0):
    """The next event is "big" where the price of the last one was above 0; users of plan "b" wait ten times longer."""
    rng = np.random.default_rng(seed)
    price, plan = rng.normal(size=(groups, length)), rng.choice(["a", "b"], groups)
    types = np.where(np.roll(price, 1, axis=1) > 0, "big", "small")
    gaps = rng.lognormal(0, 0.3, (groups, length)) * np.where(plan == "b", 10, 1)[:, None]
    table = {"type": types.ravel(), "when": gaps.cumsum(1).ravel(), "who": np.repeat(np.arange(groups), length)}
    return pd.DataFrame({**table, "price": price.ravel()}), pd.DataFrame({"plan": plan})


@pytest.fixture(scope="module")
def described():
    table, plans = priced()
    return kq.EventModel(**LEARNED).fit(table, group_covariates=plans)


def test_covariates_of_events_and_groups_are_learned(described):
    table, plans = priced(seed=1)
    bare = kq.EventModel(**LEARNED).fit(priced()[0][["type", "when", "who"]])
    assert bare.score(table[["type", "when", "who"]]) < 0.6
    assert described.score(table, group_covariates=plans) > 0.9
    first = table.groupby("who").head(1)  # of a single event, only the plan tells how long users wait
    waits = described.predict_time(first, group_covariates=plans)
    assert waits[plans["plan"] == "b"].min() > 3 * waits[plans["plan"] == "a"].max()


def test_rows_of_any_order_and_frames_of_any_kind_are_the_same(described, tmp_path):
    table, plans = priced(9)
    expected = described.predict_proba(table, group_covariates=plans)
    columns = described.predict_proba(
        table["type"], table["when"], table["who"], covariates=table[["price"]], group_covariates=plans
    )
    assert np.array_equal(columns, expected)
    mixed = table.sort_values("when")
    order = pd.unique(mixed["who"])
    assert np.allclose(described.predict_proba(mixed, group_covariates=plans.iloc[order]), expected[order], atol=1e-6)
    described.save(tmp_path / "model")
    again = kq.EventModel.load(tmp_path / "model", device="cpu")
    assert np.array_equal(again.predict_proba(table, group_covariates=plans), expected)
    found = (one.interactions(table, group_covariates=plans).change for one in (again, described))
    assert next(found) == next(found)
    drawn = again.sample(table, n=3, random_state=0, group_covariates=plans)
    assert len(drawn.events) == 27


def test_missing_and_unseen_entries_count_as_the_average():
    frame = pd.DataFrame({"x": [0.0, 1.0, 2.0, 10.0, np.nan], "kind": ["a", "b", "a", None, "a"]})
    columns = columns_of(frame)
    code = CovariateCode.learn(frame)
    inputs = code.encode(columns)
    assert inputs.shape == (5, code.size)
    widths = [len(means) for means in code.means]
    known = inputs[:4, : widths[0]]
    assert np.allclose(known.mean(0), 0, atol=1e-7)
    assert np.allclose(inputs[4, : widths[0] + 1], [0] * widths[0] + [1])
    with pytest.warns(UserWarning, match="categories not seen in training: 'c'"):
        unseen = code.encode(columns_of(pd.DataFrame({"x": [np.nan], "kind": ["c"]})))
    assert np.array_equal(unseen[0], code.blank)
    far = code.encode(columns_of(pd.DataFrame({"x": [10.0, 1e9], "kind": ["a", "a"]})))
    assert np.array_equal(far[0], far[1])
    again = Described.of_facts(Described(code, None).facts())
    assert np.array_equal(again.events.encode(columns), inputs)
    broken = {**code.facts(), "knots": [[1.0, 0.0], []]}
    with pytest.raises(ValueError, match="knots and means"):
        CovariateCode.of_facts(broken)


def test_covariates_that_do_not_fit_are_refused(described):
    table, plans = priced(9)
    columns = table["type"], table["when"], table["who"]
    with pytest.raises(ValueError, match="covariates must be given: it was fitted with them"):
        described.predict(*columns, group_covariates=plans)
    with pytest.raises(ValueError, match="group_covariates must have 9 rows, one per group"):
        described.predict(table, group_covariates=plans[:8])
    with pytest.raises(ValueError, match="feature names should match"):
        described.predict(table.rename(columns={"price": "cost"}), group_covariates=plans)
    with pytest.raises(ValueError, match="covariates must be left out: it was fitted without them"):
        kq.EventModel(**QUICK).fit(*columns).predict(*columns, covariates=table[["price"]])


def test_weights_decide_what_is_learned():
    """Half of the groups alternate, the others repeat: whose events weigh nothing are not learned."""
    rng = np.random.default_rng(0)
    times, groups = rng.exponential(size=(40, 12)).cumsum(1).ravel(), np.repeat(np.arange(40), 12)
    types = np.where(groups < 20, np.tile(["a", "b"], 240), np.repeat(rng.choice(["a", "b"], 40), 12))
    alternate = np.where(groups < 20, 1.0, 0.0)
    model = kq.EventModel(**LEARNED).fit(types, times, groups, sample_weight=alternate)
    assert model.score(types[:240], times[:240], groups[:240]) > 0.95
    assert model.score(types[240:], times[240:], groups[240:]) < 0.05
    assert model.score(types, times, groups, sample_weight=alternate) > 0.95
    with pytest.raises(ValueError, match="sample_weight must not be 0 for all events that follow another"):
        model.fit(types, times, groups, sample_weight=np.tile([1.0] + [0.0] * 11, 40))
    with pytest.raises(ValueError, match=r"[Nn]egative"):
        model.fit(types, times, groups, sample_weight=-alternate)


def visits(groups=300, seed=0):
    """After "stay" comes another event; after "leave" the group ends with probability .8, each after 1 on average."""
    rng = np.random.default_rng(seed)
    rows, ended = [], []
    for group in range(groups):
        when, over = 0.0, False
        for _ in range(12):
            kind = rng.choice(["stay", "leave"], p=[0.8, 0.2])
            rows.append((kind, when, group))
            over = kind == "leave" and rng.random() < 0.8
            if over:
                break
            when += rng.lognormal(0, 0.3)
        ended.append(bool(over))
    types, times, names = (np.array(column) for column in zip(*rows, strict=True))
    return types, times, names, np.array(ended)


def test_ends_of_groups_have_the_probability_of_the_process():
    types, times, groups, ended = visits()
    until = np.array([times[groups == group].max() for group in range(300)])
    model = kq.EventModel(**{**LEARNED, "epochs": 25}).fit(types, times, groups, ended=ended, until=until)
    history = np.array(["stay", "stay", "leave", "stay", "stay", "stay"]), np.arange(6.0) % 3, np.repeat([0, 1], 3)
    leave, stay = model.predict_end(*history)
    assert leave == pytest.approx(0.8, abs=0.12)
    assert stay < 0.05
    later = model.predict_end(*history, now=20.0)  # nobody waits that long for another event
    assert (later > [0.95, 0.3]).all()
    _, mixture, silence = model._next(*history, now=3.0)
    survival = mixture.log_survival(silence).exp().numpy()
    expected = np.array([leave, stay]) / (np.array([leave, stay]) + (1 - np.array([leave, stay])) * survival)
    assert np.allclose(model.predict_end(*history, now=3.0), expected, rtol=1e-6)
    assert np.allclose(model.predict_proba(*history).sum(1), 1)
    many = [column[groups < 100] for column in (types, times, groups)]
    drawn = model.sample(*many, n=4, random_state=0)
    assert len(drawn.events) < 400
    assert set(drawn.events) <= {"stay", "leave"}


def test_ends_that_cannot_be_learned_are_refused(tmp_path):
    types, times, groups = late(12, 8)
    with pytest.raises(ValueError, match="one of them for each of 12 groups"):
        kq.EventModel(**QUICK).fit(types, times, groups, ended=np.ones(3, dtype=bool))
    with pytest.raises(ValueError, match='ended needs information="past"'):
        kq.EventModel(**QUICK, information="target_time").fit(types, times, groups, ended=True)
    model = kq.EventModel(**QUICK).fit(types, times, groups, ended=True)
    model.save(tmp_path / "model")
    again = kq.EventModel.load(tmp_path / "model", device="cpu")
    assert np.array_equal(again.predict_end(types, times, groups), model.predict_end(types, times, groups))
    assert again.evaluate(types, times, groups) == model.evaluate(types, times, groups)
