"""The study of causes: its sequences, its orders and searches, and what is made of them."""

import io
import lzma

import numpy as np
import pytest
import torch
from keyquery_studies.causes.fill_in_model import (
    BLANK,
    CHOOSE,
    FIRST,
    LEARN,
    TEST,
    BlankModel,
    hide,
    histories,
    keep,
    load,
    reviews,
)
from keyquery_studies.causes.searches import Patient, explained, first, prefixes, sensitivity, subsets
from keyquery_studies.causes.study import CausesStudy
from keyquery_studies.causes.study import run as run_causes
from rich.console import Console
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.pages import terminal

pytestmark = pytest.mark.slow  # it trains


def films(folder, count=60, seed=0):
    """A word at the end tells whether a film is liked."""
    rng = np.random.default_rng(seed)
    lines = ["split\tlabel\ttext"]
    for number in range(count):
        label = int(rng.integers(2))
        words = [*rng.choice(["a", "film", "of", "it", "the"], 8), ("awful", "superb")[label], "!"]
        lines.append(f"{('train', 'test')[number % 3 == 2]}\t{label}\t{' '.join(words)}")
    path = folder / "films.tsv.xz"
    path.write_bytes(lzma.compress("\n".join(lines).encode()))
    return path


def bills(folder, customers=40):
    """Customers who buy items in the order of the alphabet, from anywhere on."""
    lines = ["InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country"]
    for who in range(customers):
        for day, place in enumerate(range(who % 5, who % 5 + 6)):
            item = "abcdefghij"[place]
            lines.append(f"{who}{day},{item},ITEM {item},1,12/{day + 1}/2010 8:26,1.0,{who},Here")
        lines.append(f"C{who},a,ITEM A,-1,12/9/2010 8:26,1.0,{who},Here")
    lines.append("9,a,ITEM A,1,12/9/2010 8:26,1.0,,Here")
    path = folder / "bills.csv"
    path.write_text("\n".join(lines) + "\n", encoding="latin1")
    return path


def test_reviews_are_a_blank_and_their_last_words(tmp_path):
    found = reviews(films(tmp_path))
    assert found.choices == 2
    assert (found.ids[:, 0] == BLANK).all()
    for row, answer in zip(found.ids, found.answers, strict=True):
        said = [found.words[place] for place in row if place > BLANK]
        assert said[-2:] == [("awful", "superb")[answer], "!"]
    assert [int((found.parts == part).sum()) for part in (LEARN, CHOOSE, TEST)] == [36, 4, 20]


def test_long_reviews_lose_their_beginning(tmp_path):
    path = tmp_path / "long.tsv"
    rows = [f"{split}\t1\t" + " ".join(["word"] * 300 + ["end"]) for split in ["train"] * 20 + ["test"]]
    path.write_text("split\tlabel\ttext\n" + "\n".join(rows) + "\n")
    found = reviews(path)
    assert found.ids.shape == (21, 128)
    assert found.words[found.ids[0, -1]] == "end"


def test_a_word_that_is_called_like_a_choice_is_none(tmp_path):
    path = tmp_path / "a.tsv"
    rows = [f"{split}\t1\tpositive film" for split in ["train"] * 3 + ["test"]]
    path.write_text("split\tlabel\ttext\n" + "\n".join(rows) + "\n")
    found = reviews(path)  # both words are rare
    assert (found.ids[:, 1:] == FIRST + 2).all()


def test_histories_go_back_from_what_was_bought(tmp_path):
    found = histories(bills(tmp_path))
    names = {word: place for place, word in enumerate(found.words)}
    for row, answer, part in zip(found.ids, found.answers, found.parts, strict=True):
        item, newest = found.words[answer + FIRST], found.words[row[1]]
        assert ord(item[-1]) == ord(newest[-1]) + 1  # the item after the last one
        items = [found.words[place] for place in row[1:] if place]
        assert items == sorted(items, reverse=True)
        if part != LEARN:
            assert len(items) == 5  # the last purchase alone
    assert names["item a"] >= FIRST
    assert found.choices == len(found.words) - FIRST


def test_sequences_come_back_as_they_were_kept(tmp_path):
    found = reviews(films(tmp_path))
    facts = keep(found, tmp_path, "sentiment")
    again = load(tmp_path, "sentiment", facts["digest"])
    for name in ("ids", "answers", "parts"):
        assert np.array_equal(getattr(found, name), getattr(again, name))
    assert (again.words, again.choices) == (found.words, 2)
    assert facts["sequences"] == [36, 4, 20]


def test_files_that_are_no_such_files(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("split\tlabel\ttext\ntrain\t7\tgood\n")
    with pytest.raises(ValueError, match="label must be 0 or 1, got 7"):
        reviews(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="must have columns CustomerID, Description"):
        histories(path)
    with pytest.raises(ValueError, match="0 customers with 3 items or more: too few"):
        histories(bills(tmp_path, customers=4))  # so few that every item is rare


def test_hidden_tokens_are_a_share_of_each_sequence_and_never_the_blank():
    ids = torch.full((400, 50), 7)
    ids[:, 0] = BLANK
    ids[:, 40:] = 0
    found = hide(ids, 0.8, torch.Generator().manual_seed(0))
    assert torch.equal(found[:, 40:], ids[:, 40:])
    shares = (found[:, 1:40] == BLANK).double().mean(1)
    assert abs(float(shares.mean()) - 0.4) < 0.03  # uniform between 0 and .8
    assert shares.max() > 0.6 > 0.2 > shares.min()


class Rigged(BlankModel):
    """Says 0 unless words 5 and 6 are both gone."""

    def forward(self, ids):
        gone = ~((ids == 5).any(1) | (ids == 6).any(1))
        return torch.stack((1 - gone.float(), gone.float()), 1) + 0 * super().forward(ids)


@pytest.fixture
def rigged():
    torch.manual_seed(0)
    return Rigged(words=12, choices=2, length=10, width=8, depth=1, heads=2, dropout=0.0).eval()


def test_searches_find_what_changes_a_prediction(rigged):
    patient = Patient(rigged, torch.tensor([1, 5, 7, 6, 8]))
    assert first(subsets([2, 4, 1, 3]), patient).hidden == (1, 3)
    assert first(subsets([2, 4, 1, 3]), patient).calls == 4 + 6  # all single ones, and the last of the pairs
    assert first(subsets([1, 3, 2, 4]), patient).calls == 4 + 1
    assert first(prefixes([2, 1, 3, 4]), patient) == first(iter([(2,), (2, 1), (2, 1, 3)]), patient)
    assert first(subsets([2, 4, 1, 3]), patient, most=9).hidden is None
    assert first(prefixes([2, 4]), patient).hidden is None


def test_a_prediction_is_explained_by_every_order_and_search(rigged):
    found = explained(rigged, torch.tensor([1, 5, 7, 6, 8, 0]), seed=0)
    assert found["smallest"] == 2
    assert found["nodes"] == 4
    assert set(found["found"]) == {
        f"{o} {s}" for o in ("causes", "attention", "gradient", "place", "random") for s in ("sets", "prefix")
    }
    for name, (size, calls, rank, kept) in found["found"].items():
        if name.endswith("sets") and size is not None:
            assert size == 2
        if size is not None:
            assert calls >= size if name.endswith("prefix") else calls > 4 or name == "causes sets"
            assert (rank, kept) == (2, 1.0)  # of two choices, the other


def test_gradient_times_input_is_what_a_change_of_length_does():
    torch.manual_seed(1)
    model = BlankModel(words=9, choices=3, length=5, width=8, depth=1, heads=2, dropout=0.0).double().eval()
    ids = torch.tensor([1, 6, 7, 8])
    vectors, mask = model.tokens(ids[None]).detach(), torch.ones(1, 4, dtype=torch.bool)
    for place, value in enumerate(sensitivity(model, ids, 2)):
        step = torch.zeros(1, 4, 1, dtype=torch.double)
        step[0, place] = 1e-5
        with torch.no_grad():
            ends = [float(model.filled(vectors * (1 + sign * step), mask)[0, 2]) for sign in (1, -1)]
        assert float(value) == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-7)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("causes")
    sources = {"sentiment": films(folder, 300), "recommendation": bills(folder)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("WIDTH", 32), ("BATCH", 32)):
            patch.setattr(f"keyquery_studies.causes.study.{name}", value)
        patch.setattr("keyquery_studies.causes.searches.CALLS", 200)  # all sets of 1, 2 and 3 of 10 words
        yield run_causes(sources, folder / "out", seeds=(0,), count=6, steps=45), sources, folder / "out"


def test_models_learn_and_the_word_that_tells_is_found(study):
    reading, _, _ = study
    films, bills = reading.models
    assert films["accuracy"] == 1.0
    assert bills["accuracy"] == 1.0
    assert bills["among_ten"] is None  # there are no more than ten items
    rows = [row for row in reading.rows if row["application"] == "sentiment"]
    told = [row for row in rows if row["smallest"] is not None]  # without that word, a model says the same of all
    assert 0 < len(told) < len(rows)
    assert any(row["smallest"] == 1 for row in told)
    for row in told:  # an order of all words finds the smallest sets there are, sooner or later
        assert all(row["found"][f"{order} sets"][0] == row["smallest"] for order in ("attention", "gradient", "random"))
        assert row["found"]["causes sets"][0] in (None, *range(row["smallest"], 4))


def test_results_are_kept_and_not_made_again(study):
    reading, sources, out = study
    before = {path: path.stat().st_mtime_ns for path in (out / "results").iterdir()}
    again = run_causes(sources, out, seeds=(0,), count=6, steps=45)
    assert again.rows == reading.rows
    assert {path: path.stat().st_mtime_ns for path in (out / "results").iterdir()} == before


def row(sequence, **found):
    return {"application": "sentiment", "seed": 0, "sequence": sequence, "smallest": 1, "found": found}


def test_a_summary_compares_prediction_by_prediction():
    none = [None, 500, None, None]
    rows = [
        row(0, **{"causes sets": [1, 2, 2, 1.0], "random sets": [3, 8, 2, 1.0]}),
        row(1, **{"causes sets": [2, 4, 2, 1.0], "random sets": [3, 6, None, 0.5]}),
        row(2, **{"causes sets": [1, 2, 2, 1.0], "random sets": none}),
    ]
    reading = CausesStudy(models=[], rows=rows, provenance={})
    ours, other = reading.summary()
    assert ours["found"].change == 1.0
    assert ours["size"].change == pytest.approx(4 / 3)
    assert other["found"].change == pytest.approx(2 / 3)
    assert other["calls"].change == pytest.approx(514 / 3)
    assert other["shorter"].change == pytest.approx(1.5)  # 2 and 1, the third was not found by both
    assert other["fewer"].change == pytest.approx(4.0)
    assert (other["compared"], other["rank"], other["kept"]) == (2, 11, 0.75)


def test_the_study_is_shown_drawn_and_comes_back(study, tmp_path):
    reading, _, _ = study
    page = io.StringIO()
    terminal.show(reading, Console(width=100, file=page))
    text = page.getvalue()
    assert "Sentiment of reviews: 100.0% correct" in text
    assert text.count("gradient × input") == 4
    assert max(map(len, text.splitlines())) <= 100
    again = kq.Reading.load(reading.to_json())
    assert again.summary() == reading.summary()
    assert len(reading.plot().axes) == 4


def test_the_command_line_runs_it(study, tmp_path):
    _, sources, out = study
    options = [
        "--reviews",
        str(sources["sentiment"]),
        "--out",
        str(out),
        "--seed",
        "0",
        "--count",
        "6",
        "--steps",
        "45",
    ]
    run = CliRunner().invoke(cli.app, ["study", "causes", *options, "--json", str(tmp_path / "a.json")])
    assert run.exit_code == 0, run.output
    assert "causal graph" in run.output
    assert kq.Reading.load(tmp_path / "a.json").models[0]["application"] == "sentiment"
    run = CliRunner().invoke(cli.app, ["study", "causes"])
    assert run.exit_code != 0
