"""The study of time: its readers, its trials, and what is made of them."""

import io
import lzma

import numpy as np
import pytest
from keyquery_studies.time.arms import ARMS, ArmModel
from keyquery_studies.time.event_files import Timed, read_badges, read_cdnow, read_retail, split
from keyquery_studies.time.hawkes import BASE, DECAY, EXCITATION, exact, simulate
from keyquery_studies.time.study import WAYS, EventTrial, TimeStudy, prepare, run_arms
from keyquery_studies.time.study import run as run_time
from rich.console import Console
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.pages import terminal


def badges(folder, users=12, each=20, seed=0):
    """Two types that take turns, at gaps of a day and of three."""
    rng = np.random.default_rng(seed)
    times, types = [], []
    for _ in range(users):
        kinds = (np.arange(each) + rng.integers(2)) % 2
        times.append(86_400 * (np.where(kinds, 1.0, 3.0) + 0.01 * rng.random(each)).cumsum())
        types.append(kinds + 1)
    path = folder / "badges.npz"
    offsets = np.arange(users + 1) * each
    np.savez(path, time=np.concatenate(times), event=np.concatenate(types), offsets=offsets)
    return path


RETAIL = """InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country
1,a,"A, LIGHT",2,12/1/2010 8:26,1.5,7,Here
1,b,B,1,12/1/2010 8:26,1.0,7,Here
2,a,A,100,12/3/2010 8:26,2.0,7,Here
C3,a,A,-1,12/4/2010 8:26,2.0,7,Here
4,a,A,1,12/1/2010 9:00,30.0,,Here
5,a,A,1,12/2/2010 9:00,30.0,8,Here
"""


@pytest.mark.parametrize(
    "line", ["a" * 200_000, '"' + "b" * 200_000, "," * 5_000_000, "1,a,A,x" + "c" * 100_000 + ",9,2,7,Here"]
)
def test_a_hostile_line_is_refused_in_a_sentence(line, tmp_path):
    (tmp_path / "retail.csv").write_text(RETAIL + line + "\n")
    with pytest.raises(ValueError, match=r"retail.csv") as refusal:
        read_retail(tmp_path / "retail.csv")
    assert len(str(refusal.value)) < 1000


def test_an_invoice_is_one_event_by_what_it_comes_to(tmp_path):
    path = tmp_path / "retail.csv.xz"
    path.write_bytes(lzma.compress(RETAIL.encode("latin1")))
    found = read_retail(path)
    assert found.types.tolist() == ["small", "large", "return", "middle"]  # 4, 200 and 30 in thirds
    assert found.groups.tolist() == [7, 7, 7, 8]
    assert np.allclose(np.diff(found.times[:3]), [2.0, 1.0])
    assert found.left_out == "1 rows without a customer"


def test_files_that_are_no_such_files(tmp_path):
    path = tmp_path / "file"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="must have columns CustomerID, InvoiceDate"):
        read_retail(path)
    with pytest.raises(ValueError, match="holds no purchase"):
        read_cdnow(path)
    path.write_text("00001 19971301 1 1.0\n")
    with pytest.raises(ValueError, match="line 1: expected customer, date"):
        read_cdnow(path)
    with pytest.raises(ValueError, match=r"must be an \.npz file with arrays"):
        read_badges(path)
    np.savez(tmp_path / "a.npz", time=[0.0, 1.0], event=[1, 1], offsets=[0, 3])
    with pytest.raises(ValueError, match="offsets must rise from 0 to 2"):
        read_badges(tmp_path / "a.npz")


def test_groups_are_split_apart_and_whole(tmp_path):
    facts = prepare({"badges": badges(tmp_path)}, tmp_path)["badges"]
    assert (facts["events"], facts["groups"], facts["types"]) == (240, 12, 2)
    learned, test = split(tmp_path / f"badges-{facts['digest']}.npz")
    assert set(learned.groups) & set(test.groups) == set()
    assert len(set(test.groups)) == 2
    assert len(learned.types) + len(test.types) == 240
    assert set(np.bincount(np.concatenate((learned.groups, test.groups)))) == {20}


def way(row):
    return row["time"], row["how"], row["calendar"], row["information"]


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    folder = tmp_path_factory.mktemp("time")
    return run_time({"badges": badges(folder)}, folder / "out", seeds=(0, 1, 1), epochs=2, width=8, device="cpu")


def test_every_way_is_tried_once_a_seed(reading):
    keys = [(*way(row), row["seed"]) for row in reading.rows]
    assert sorted(keys) == sorted((*way, seed) for way in WAYS for seed in (0, 1))
    assert {row["by"]: row["information"] for row in reading.counts} == {"majority": "past", "Markov": "past"}
    assert {row["by"]: row["accuracy"] for row in reading.counts}["Markov"] == 1.0  # they take turns
    assert kq.Reading.load(reading.to_json()) == reading


def test_gain_is_over_positions_of_the_same_seed(reading):
    rows = {way(row): row for row in reading.summary()}
    assert rows[WAYS[0]]["gain"] == 0
    own = [row["nll_type"] for row in reading.rows if way(row) == WAYS[2]]
    base = [row["nll_type"] for row in reading.rows if row["time"] == "positions"]
    assert rows[WAYS[2]]["gain"] == pytest.approx(np.mean(np.subtract(base, own)))
    assert rows[WAYS[2]]["gain_sd"] == pytest.approx(np.std(np.subtract(base, own), ddof=1))
    alone = TimeStudy(rows=[row for row in reading.rows if row["time"] != "positions"], counts=[])
    assert {row["gain"] for row in alone.summary()} == {None}
    with pytest.raises(ValueError, match="nothing to compare"):
        alone.plot()


def test_runs_made_apart_are_joined(reading):
    first, then = (TimeStudy(rows=[r for r in reading.rows if r["seed"] == s], counts=reading.counts) for s in (0, 1))
    both = TimeStudy.joined(first, then, first)
    assert both.summary() == reading.summary()
    assert both.counts == reading.counts


def test_tables_fit_the_terminal(reading):
    page = io.StringIO()
    terminal.show(reading, Console(width=100, file=page))
    text = page.getvalue()
    assert "…" not in text
    assert "Mercer, additive" in text
    assert "and its time" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_picture_has_a_panel_a_set(reading):
    figure = reading.plot()
    assert [axis.get_title() for axis in figure.axes] == ["Stack Overflow badges"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [
        "Bochner, concatenated",
        "Mercer, concatenated",
        "Mercer, additive",
        "Mercer, interaction",
        "Mercer, calendar time",
    ]


def test_what_is_trained_names_the_file():
    one = EventTrial(
        dataset="badges", digest="a", time="mercer", how="additive", calendar=False, information="past", seed=0
    )
    assert one.name.startswith("badges-mercer-additive-False-past-0-")


def test_the_command(tmp_path):
    path, out = badges(tmp_path), tmp_path / "out"
    options = ["--seed", "0", "--epochs", "1", "--width", "8", "--device", "cpu", "-q", "--out", str(out)]
    run = CliRunner().invoke
    done = run(cli.app, ["study", "time", "--badges", str(path), *options, "--json", str(tmp_path / "a.json")])
    assert done.exit_code == 0, done.output
    assert len(list((out / "results").iterdir())) == len(WAYS) == len(kq.Reading.load(tmp_path / "a.json").rows)
    refused = run(cli.app, ["study", "time", *options])
    assert isinstance(refused.exception, ValueError)
    assert "give at least one event file" in str(refused.exception)


# The four arms


def test_the_exact_likelihood_is_that_of_the_intensities():
    """Two events and one to come: types by quadrature, the gap by differentiating the survival function."""
    from scipy.integrate import quad

    events = Timed(np.array([1, 1, 2]), np.array([5.0, 5.7, 6.9]), np.zeros(3, dtype=int))

    def rates(t, history):
        return BASE + sum(DECAY * EXCITATION[:, k] * np.exp(-DECAY * (t - s)) for s, k in history)

    def survival(t, start, history):
        return np.exp(-quad(lambda u: rates(u, history).sum(), start, t)[0])

    kinds, gaps = [], []
    for count in (1, 2):
        history = list(zip(events.times[:count], events.types[:count], strict=True))
        start, end, kind = events.times[count - 1], events.times[count], events.types[count]
        chance = quad(lambda t: rates(t, history)[kind] * survival(t, start, history), start, start + 100)[0]  # noqa: B023
        kinds.append(-np.log(chance))
        gaps.append(-np.log(rates(end, history).sum() * survival(end, start, history)))
    true = exact(events)
    assert true["nll_type"] == pytest.approx(np.mean(kinds), abs=1e-4)
    assert true["nll_gap"] == pytest.approx(np.mean(gaps), abs=1e-9)


def test_the_true_process_predicts_its_events_better_than_a_markov_chain():
    events = simulate(groups=60, length=40, seed=3)
    inside = events.groups[1:] == events.groups[:-1]
    before, after = events.types[:-1][inside], events.types[1:][inside]
    counts = np.ones((4, 4))
    np.add.at(counts, (before, after), 1)
    markov = -np.log((counts / counts.sum(1, keepdims=True))[before, after]).mean()
    assert exact(events)["nll_type"] < markov - 0.03


def test_the_arms_have_equally_many_parameters_and_see_what_they_should():
    events = simulate(groups=12, length=8)
    sizes, sees = {}, {}
    for arm, (gap_input, kernel) in ARMS.items():
        model = ArmModel(time="mercer" if kernel else "positions", epochs=1, random_state=0, device="cpu")
        model.gap_input = gap_input
        model.fit(*events[:3])
        sizes[arm] = model.parameters
        later = np.where(np.arange(len(events.times)) % 8 == 3, events.times + 1e-3, events.times)  # order unchanged
        changed = model.predict_proba(events.types, later, events.groups)
        sees[arm] = not np.array_equal(changed, model.predict_proba(*events[:3]))
    assert all(abs(size - sizes["both"]) <= 33 for size in sizes.values())  # half of a unit of the MLP
    assert sees == {"order": False, "gap": True, "kernel": True, "both": True}


def test_the_arms_are_trained_at_their_own_rate(tmp_path, monkeypatch):
    monkeypatch.setattr("keyquery_studies.time.study.RATES", (1e-3, 4e-3))
    monkeypatch.setattr("keyquery_studies.common.rates.EXTENSIONS", 0)
    monkeypatch.setattr("keyquery_studies.time.study.simulate", lambda: simulate(groups=15, length=3))
    study = run_arms({}, tmp_path, seeds=(0, 1), epochs=1, device="cpu")
    assert sorted({(row["arm"], row["seed"]) for row in study.arms}) == sorted((arm, s) for arm in ARMS for s in (0, 1))
    assert all(len({row["lr"] for row in study.arms if row["arm"] == arm}) == 1 for arm in ARMS)
    stopped = run_arms({}, tmp_path / "late", seeds=(0,), epochs=1, device="cpu", minutes=0)
    assert stopped.arms == []
