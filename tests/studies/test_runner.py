"""The runner and its store: every run is done once, alone or beside others, and resumed if it was interrupted."""

from dataclasses import dataclass

import pytest
from keyquery_studies.common.runner import check_folder, resumed, run_jobs, run_parts, study_folder
from keyquery_studies.common.store import Store, checkpoint_path


@dataclass(frozen=True)
class Small:
    """A job that is no training."""

    number: int

    @property
    def name(self):
        return f"{self.number}.json"

    def run(self, folder, device):
        if self.number == 1:
            raise FloatingPointError("the loss is nan")
        return {"number": self.number}


@pytest.mark.slow
def test_a_job_that_fails_beside_others_does_not_stop_them(tmp_path):
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        run_jobs([Small(number) for number in range(4)], tmp_path, "cpu", workers=2)
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"0.json", "2.json", "3.json"}
    assert run_jobs([Small(3), Small(0)], tmp_path, "cpu", workers=2) == [{"number": 3}, {"number": 0}]


class Square:
    """A job that counts how often it is run."""

    runs = 0

    def __init__(self, number):
        self.number = number

    @property
    def name(self):
        return f"{self.number}.json"

    def run(self, folder, device):
        Square.runs += 1
        return {"square": self.number**2, "partial": self.number > 9}


def test_parts_share_results_and_only_complete_ones_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(Square, "runs", 0)
    parts = {"small": [Square(2), Square(3)], "none": [], "again": [Square(2)]}
    rows = run_parts(parts, tmp_path, "cpu")
    assert {part: [row["square"] for row in rows[part]] for part in rows} == {"small": [4, 9], "none": [], "again": [4]}
    assert Square.runs == 2
    run_jobs([Square(3), Square(10)], tmp_path, "cpu")
    run_jobs([Square(3), Square(10)], tmp_path, "cpu")
    assert Square.runs == 4  # the partial one twice


def test_runs_in_order_are_resumed(tmp_path):
    computed = []

    def compute(number):
        if number == 3 and len(computed) < 3:
            computed.append(number)
            raise KeyboardInterrupt
        computed.append(number)
        return [number, float("nan")]

    store = Store(tmp_path / "new", list)
    with pytest.raises(KeyboardInterrupt):
        list(resumed([1, 2, 3], str, compute, store))
    assert [result[0] for result in resumed([1, 2, 3], str, compute, store)] == [1, 2, 3]
    assert computed == [1, 2, 3, 3]


def test_a_damaged_result_is_named_and_never_overwritten(tmp_path):
    (tmp_path / "results").mkdir()
    for text in ('{"square": 4', "7", "[]", "\xff"):
        (tmp_path / "results" / "2.json").write_text(text, encoding="latin1")
        with pytest.raises(ValueError, match=r"2\.json is an incomplete result: delete it to recompute it"):
            run_jobs([Square(2)], tmp_path, "cpu")
        assert (tmp_path / "results" / "2.json").read_text(encoding="latin1") == text


def test_a_row_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        Store(tmp_path).write("a.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_study_without_out_leaves_nothing_behind(tmp_path):
    with study_folder(None) as folder:
        path = checkpoint_path(folder, "a-1.json")
        assert (path.parent.is_dir(), path.name) == (True, "a-1.pt")
    assert not folder.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"out must be a folder, and .* is a file"):
        check_folder(tmp_path / "file")
