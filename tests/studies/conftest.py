"""What studies are tried on."""

import lzma

import numpy as np
import pytest
from keyquery_studies.common.objectives import Task
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli


@pytest.fixture
def study(tmp_path):
    """A study by its command: the reading that it writes, once more with the results that are kept in --out."""

    def run(name, *options, resume=True):
        words = ["study", name, *map(str, options), "--device", "cpu", "--out", str(tmp_path / "out")]
        readings = []
        for file in ("first.json", "again.json")[: 1 + resume]:
            done = CliRunner().invoke(cli.app, [*words, "--json", str(tmp_path / file)], env={"COLUMNS": "100"})
            assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
            assert max(map(len, done.output.splitlines())) <= 100
            readings.append(kq.Reading.load(tmp_path / file))
        assert len({reading.to_json() for reading in readings}) == 1
        return readings[0]

    return run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "tale.txt"
    path.write_text(kq.models.TEXT.read_text() * 6)
    return path


@pytest.fixture(scope="module")
def few_windows():
    """Language models that are trained on batches of 16 and evaluated on 64 windows, instead of 128 and 256 or more.

    Grids of learning rates do not grow.
    """

    class Small(Task):
        def __init__(self, *data, batch=16, checks=64):
            super().__init__(*data, batch=batch, checks=checks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keyquery_studies.common.language_models.EXAM", 64)
        patch.setattr("keyquery_studies.common.objectives.LOOKED_AT", 32)
        patch.setattr("keyquery_studies.common.rates.EXTENSIONS", 0)
        for module in ("common.language_models", "objectives.study"):
            patch.setattr(f"keyquery_studies.{module}.Task", Small)
        yield


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """Two sets, each of two classes, as .ts files."""
    folder, rng = tmp_path_factory.mktemp("series"), np.random.default_rng(0)
    for name in ("Waves", "Vowels"):
        for part in ("TRAIN", "TEST"):
            values = [",".join(f"{value:.3f}" for value in rng.normal(i % 2, 1, 12)) for i in range(10)]
            lines = [f"{row}:{'ab'[i % 2]}" for i, row in enumerate(values)]
            (folder / f"{name}_{part}.ts").write_text("\n".join(["@classLabel true a b", "@data", *lines]) + "\n")
    return folder


@pytest.fixture(scope="module")
def sheets(tmp_path_factory):
    """Yacht and Boston as their files are, with other numbers: the target is of the last feature and of a category."""
    folder, rng = tmp_path_factory.mktemp("sheets"), np.random.default_rng(0)
    for name, features in (("yacht", 6), ("boston", 13)):
        codes, x = rng.integers(0, 3, (60, features - 1)), rng.normal(size=60)
        rows = [[*map(float, code), last, 10 * last + 5 * code[0]] for code, last in zip(codes, x, strict=True)]
        text = "".join(" ".join(f"{value:.4f}" for value in row) + "\n" for row in rows)
        (folder / f"uci_{name}_data.txt.xz").write_bytes(lzma.compress(text.encode()))
    return folder
