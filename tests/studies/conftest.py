"""What studies are tried on."""

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
