"""Users keep results for years: the names of result files and of data files, as literal strings, must never change."""

import pytest
from keyquery_studies.causes.fill_in_model import keep, reviews
from keyquery_studies.causes.study import BlankTrial
from keyquery_studies.common.language_models import Training, prepare
from keyquery_studies.common.runner import Job
from keyquery_studies.datapoints.baselines import Baseline
from keyquery_studies.datapoints.lookups import LookUp
from keyquery_studies.datapoints.tables import prepare_tables
from keyquery_studies.datapoints.trial import TableTrial, settings_of
from keyquery_studies.dial.study import Subject, result_names, trials_of
from keyquery_studies.kernels.synthetic import Trial
from keyquery_studies.objectives.study import Place
from keyquery_studies.primal.arena.speed import Speed
from keyquery_studies.primal.arena.tasks import prepare_arena
from keyquery_studies.primal.arena.training import ArenaTraining
from keyquery_studies.primal.uea_series import SeriesTrial, prepare_series
from keyquery_studies.rerank.datasets import _digest
from keyquery_studies.rerank.study import RerankTrial
from keyquery_studies.time.study import EventTrial
from keyquery_studies.time.study import prepare as prepare_events
from keyquery_studies.words.masked_words import Ranking
from keyquery_studies.words.planted_models import PlantedTraining

import keyquery as kq
from keyquery.layers import Shape

DATA = "0123456789abcdef"
TEXT = {"text": DATA, "vocabulary": 4096}
EVENTS = {"time": "mercer", "how": "additive", "calendar": False, "information": "past"}
JOBS = {
    "next-token-psd-default-1.0-800-0.002-0-6914ecbac6": Training(
        objective="next token", kernel="psd", seed=0, steps=800, **TEXT
    ),
    "masked-general-tied-0.02-400-0.002-2-4eae50363d": Training(
        objective="masked", kernel="general", seed=2, steps=400, share=0.02, init="tied", **TEXT
    ),
    "look-up-skew-128-3-7fbd4992ce": Trial("look-up", "skew", 128, 3),
    "ranks-0-d9c638adcc": Ranking(seed=0, text=DATA, model="models/encoder", size=4096, mask=1),
    "next-token-random-0-9949860fef": PlantedTraining(
        objective="next token", start="random", seed=0, steps=300, text=DATA, vocabulary=2048
    ),
    "yacht-published-general-1-8595f533ff": TableTrial(
        table="yacht", digest=DATA, fold=1, protocol="published", **settings_of("yacht", "published")
    ),
    "boston-inductive-psd-0-289c9a5832": TableTrial(table="boston", digest=DATA, fold=0, kernel="psd", deadline=5.0),
    "breast-boosting-2-f71cdf5b8d": Baseline(table="breast", digest=DATA, fold=2, model="boosting"),
    "lookup-plain-none-0-b1747017e4": LookUp(variant="plain", rows="none"),
    "listops-primal-0.2-0-daa9dcac48": ArenaTraining(
        task="listops", attention="primal", seed=0, data=DATA, share=0.2, minutes=3.0
    ),
    "speed-image-975880c0f9": Speed(task="image", where="cpu"),
    "JapaneseVowels-primal+-held-out-default-512-4-8fb3fd4ad2": SeriesTrial(
        dataset="JapaneseVowels", digest=DATA, attention="primal+", seed=4
    ),
    "images-learned-psd-1-861e7d34da": RerankTrial(
        dataset="images", digest=DATA, method="learned, psd", seed=1, shared=True
    ),
    "images-diffusion-1-c100f461f8": RerankTrial(dataset="images", digest=DATA, method="diffusion", seed=1),
    "cdnow-mercer-additive-False-past-0-c23df7e448": EventTrial(dataset="cdnow", digest=DATA, seed=0, **EVENTS),
    "sentiment-0-8da0e368a6": BlankTrial(application="sentiment", digest=DATA, seed=0, steps=2000),
}


@pytest.mark.parametrize("name", JOBS)
def test_equal_settings_keep_their_result_file(name):
    assert isinstance(JOBS[name], Job)
    assert JOBS[name].name == f"{name}.json"


def test_results_of_objectives_and_dial_keep_their_place(tmp_path):
    assert Place(tmp_path, "a text", Shape(vocab_size=300), 20, False).work == tmp_path / "work" / "af164095f4f8"
    subject = Subject.load(kq.models.DECODER, "cpu")
    trials = list(trials_of(subject, {"tale": kq.models.TEXT.read_text()}, [0], 2, 16))
    names = result_names(subject, [trial for trial in trials if trial.ability.name == "next token"], "all")
    assert list(names.values()) == ["decoder-next-token-tale-7052257c06.json"]


def written(folder, **files):
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_equal_tokens_and_tables_keep_their_digest(tmp_path):
    out = tmp_path / "out"
    written(tmp_path, tale__txt="A tale of two cities. " * 200)
    assert prepare(tmp_path / "tale.txt", out, 300)["digest"] == "fce42ccd18ff9b7c"
    rows = "".join(f"{i % 3} {i} {i} {i % 2} 1.5 {i / 4} {i / 8}\n" for i in range(20))
    written(tmp_path, uci_yacht_data__txt=rows)
    assert prepare_tables(tmp_path, out, ["yacht"])["yacht"]["digest"] == "c24ea37ada2ebaca"
    names = {path.name for path in out.glob("*.npz")}
    assert names == {"yacht-c24ea37ada2ebaca.npz"}


def test_equal_sequences_keep_their_digest(tmp_path):
    out = tmp_path / "out"
    written(tmp_path, cdnow__txt=" 00001 19970101  1  11.77\n 00001 19970103  5  60.00\n")
    assert prepare_events({"cdnow": tmp_path / "cdnow.txt"}, out)["cdnow"]["digest"] == "0eed42cc0abd55cd"
    written(tmp_path, films__tsv="split\tlabel\ttext\n" + "train\t1\ta film\n" * 20 + "test\t0\ta film\n")
    assert keep(reviews(tmp_path / "films.tsv"), out, "sentiment")["digest"] == "d7462e51ad4bba3e"
    series = "@classLabel true a b\n@data\n1,2,3:a\n4,5,6:b\n"
    written(tmp_path, Waves_TRAIN__ts=series, Waves_TEST__ts=series)
    assert prepare_series(tmp_path, out)[0]["digest"] == "10b1e4e4fa0d2c27"
    assert prepare_arena("listops", out, examples=(4, 2, 2))["digest"] == "7425120adef3dbbe"
    names = {path.name for path in out.glob("*.npz")}
    assert names == {
        "cdnow-0eed42cc0abd55cd.npz",
        "sentiment-d7462e51ad4bba3e.npz",
        "Waves-10b1e4e4fa0d2c27.npz",
    }


def test_embeddings_are_keyed_by_the_bytes_of_a_file_or_the_names_and_sizes_in_a_folder(tmp_path):
    written(tmp_path, tale__txt="A tale of two cities. " * 200)
    assert _digest(tmp_path / "tale.txt") == "ef6413e826376c13a6d593eb247458af61f73f29dc28633e7492ecd85c16f440"
    (tmp_path / "series").mkdir()
    series = "@classLabel true a b\n@data\n1,2,3:a\n4,5,6:b\n"
    folder = written(tmp_path / "series", Waves_TRAIN__ts=series, Waves_TEST__ts=series)
    assert _digest(folder) == "bdb5641c8bee4a738db5ef70fc7444c0db8a1b7b55757d88627e6d380a65227a"
