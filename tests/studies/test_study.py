"""The base class of studies: its command, its parts, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from keyquery_studies.common.study import Study, StudyReading, Trial, option
from typer.testing import CliRunner

import keyquery as kq


@dataclass(frozen=True, kw_only=True)
class PowerStudy(StudyReading, kind="power study"):
    """Powers of numbers."""

    squares: Sequence[Mapping[str, Any]]
    cubes: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class Power(Trial):
    """One power; its runs are counted in the folder."""

    number: int
    exponent: int

    def run(self, folder: Path, device: str) -> dict[str, Any]:
        """The power, where it was computed, and a curve."""
        with (folder / "runs").open("a") as file:
            file.write("x")
        return {**self.settings(), "value": self.number**self.exponent, "device": device, "curve": [1, 2]}


@dataclass(frozen=True, kw_only=True)
class Powers(Study):
    """Compute powers."""

    result = PowerStudy

    files: tuple[Path, ...] = option(help="Any file.", argument=True)
    numbers: tuple[int, ...] = option((2, 3), "A number.", "number")
    cubes: bool = option(False, "Also cubes.")
    most: int = option(9, "The largest number.", least=1)

    def prepare(self, folder: Path, force: bool) -> dict[str, Any]:
        """Refuse large numbers."""
        if max(self.numbers) > self.most:
            raise ValueError(f"numbers must be at most {self.most}")
        return {"files": len(self.files)}

    def jobs(self, facts: Mapping[str, Any]) -> Mapping[str, Sequence[Power]]:
        """Squares, and cubes if wanted."""
        parts = {"squares": 2, "cubes": 3} if self.cubes else {"squares": 2}
        return {part: [Power(number=n, exponent=power) for n in self.numbers] for part, power in parts.items()}


@pytest.fixture
def command(tmp_path):
    app = typer.Typer()
    app.command()(Powers.command())

    def run(*words):
        return CliRunner().invoke(
            app, ["a.txt", *map(str, words), "--device", "cpu", "--json", str(tmp_path / "a.json")]
        )

    return run


def test_fields_are_options_and_their_defaults_those_of_python(command, tmp_path):
    done = command("--force")
    assert done.exit_code == 0, done.output
    reading, expected = kq.Reading.load(tmp_path / "a.json"), Powers(files=(Path("a.txt"),)).run(device="cpu")
    assert [row["value"] for row in reading.squares] == [4, 9]
    assert reading == expected
    assert reading.provenance["plan"] == {"files": ["a.txt"], "numbers": [2, 3], "cubes": False, "most": 9}
    assert "value" in done.output
    assert command("--force", "--number", 5, "--number", 5, "--cubes").exit_code == 0  # a number given twice is one
    rows = kq.Reading.load(tmp_path / "a.json").records()
    assert [(row["part"], row["value"], "curve" in row) for row in rows] == [
        ("squares", 25, False),
        ("cubes", 125, False),
    ]
    assert command("--force", "--most", 0).exit_code == 2
    shown = CliRunner().invoke(_app(), ["--help"], env={"COLUMNS": "200"}).output
    assert "A number. Repeatable. Default: 2, 3." in " ".join(shown.split())


def _app():
    app = typer.Typer()
    app.command()(Powers.command())
    return app


def test_results_are_kept_by_their_settings_and_not_computed_again(tmp_path):
    out = tmp_path / "out"
    first = Powers(files=()).run(out, "cpu")
    assert Powers(files=()).run(out, "cpu") == first
    more = Powers(files=(), numbers=(3, 4)).run(out, "cpu")
    assert [row["value"] for row in more.squares] == [9, 16]
    assert (out / "runs").read_text() == "xxx"  # of 2, 3 and 4
    assert len(list((out / "results").iterdir())) == 3


def test_what_is_refused_is_refused_before_any_job(tmp_path):
    with pytest.raises(ValueError, match="numbers must be at most 1"):
        Powers(files=(), most=1).run(tmp_path / "out", "cpu")
    assert not (tmp_path / "out" / "results").exists()
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        Powers(files=()).run(workers=0)
