"""Users keep results for years: the names of result files and of data files, as literal strings, must never change."""

import pytest
from keyquery_studies.common.language_models import Training, prepare
from keyquery_studies.common.runner import Job
from keyquery_studies.kernels.synthetic import Trial
from keyquery_studies.objectives.study import Place
from keyquery_studies.primal.series import prepare_series

from keyquery.layers import Shape

DATA = "0123456789abcdef"
TEXT = {"text": DATA, "vocabulary": 4096}
JOBS = {
    "next-token-psd-default-1.0-800-0.002-0-6914ecbac6": Training(
        objective="next token", kernel="psd", seed=0, steps=800, **TEXT
    ),
    "masked-general-tied-0.02-400-0.002-2-4eae50363d": Training(
        objective="masked", kernel="general", seed=2, steps=400, share=0.02, init="tied", **TEXT
    ),
    "look-up-skew-128-3-7fbd4992ce": Trial("look-up", "skew", 128, 3),
}


@pytest.mark.parametrize("name", JOBS)
def test_equal_settings_keep_their_result_file(name):
    assert isinstance(JOBS[name], Job)
    assert JOBS[name].name == f"{name}.json"


def test_results_of_objectives_keep_their_place(tmp_path):
    assert Place(tmp_path, "a text", Shape(vocab_size=300), 20, False).work == tmp_path / "work" / "af164095f4f8"


def written(folder, **files):
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_equal_tokens_and_series_keep_their_digest(tmp_path):
    out = tmp_path / "out"
    written(tmp_path, tale__txt="A tale of two cities. " * 200)
    assert prepare(tmp_path / "tale.txt", out, 300)["digest"] == "fce42ccd18ff9b7c"
    series = "@classLabel true a b\n@data\n1,2,3:a\n4,5,6:b\n"
    written(tmp_path, Waves_TRAIN__ts=series, Waves_TEST__ts=series)
    assert prepare_series(tmp_path, out)[0]["digest"] == "10b1e4e4fa0d2c27"
    assert {path.name for path in out.glob("*.npz")} == {"Waves-10b1e4e4fa0d2c27.npz"}
