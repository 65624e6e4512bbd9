"""How many lines of Python each package may have: what grows says what shrinks."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# By `wc -l`, docstrings and blanks included: at most, and the target. What raises one says why.
BUDGETS = {
    "src/keyquery/support": (1360, 2200),
    "src/keyquery/kinds.py": (90, 200),
    "src/keyquery/reading.py": (290, 400),
    "src/keyquery/forms": (2450, 2900),
    "src/keyquery/checkpoints": (6180, 6000),  # every field of a config is known, and every tensor of attention
    "src/keyquery/layers": (1110, 1500),
    "src/keyquery/listening": (4940, 3000),
    "src/keyquery/intervene": (2530, 2500),
    "src/keyquery/proof": (1840, 1400),
    "src/keyquery/pages": (780, 1700),
    "src/keyquery/instruments": (10810, 10500),
    "src/keyquery/learn": (15960, 15500),
    "src/keyquery/testing": (380, 440),
    "src/keyquery/survey": (1070, 1300),
    "src/keyquery/models": (30, 30),
    "src/keyquery/cli": (1730, 1600),
    "src/keyquery": (51470, 47000),
    "studies": (9980, 10000),
    "tests": (36400, 34000),
    "bench": (3500, 3600),
    "tools": (1810, 1100),  # the search for architectures moved here, and the sweep of their fields
}


def lines_of(path):
    files = path.rglob("*.py") if path.is_dir() else [path]
    return sum(file.read_bytes().count(b"\n") for file in files)


@pytest.mark.parametrize("name", BUDGETS)
def test_a_package_keeps_within_its_budget(name):
    lines, (budget, target) = lines_of(ROOT / name), BUDGETS[name]
    assert lines <= budget, (
        f"{name} has {lines:,} lines of Python and may have {budget:,} (the design: {target:,}): take away as many as "
        "you add, or say in the commit what shrinks instead"
    )


def test_every_package_has_a_budget():
    packages = {path for path in (ROOT / "src/keyquery").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert {f"src/keyquery/{path.name}" for path in packages} <= BUDGETS.keys()


def test_a_package_above_its_budget_fails(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("pass\n" * 3)
    monkeypatch.setitem(BUDGETS, str(tmp_path), (2, 2))
    with pytest.raises(AssertionError, match="has 3 lines of Python and may have 2"):
        test_a_package_keeps_within_its_budget(str(tmp_path))
