"""Trials of the study of primal attention on series, small: the data they get, what they change, and what they say."""

import gzip
import lzma

import numpy as np
import pytest
from keyquery_studies.primal.series import PUBLISHED, SeriesTrial, prepare_series, published_settings


def written(path, count, seed, labels=("down", "up"), dims=2):
    """A .ts file of slopes, of lengths 5 to 9."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(count):
        slope = np.linspace(-2, 2, rng.integers(5, 10)) * (1 if i % 2 else -1)
        values = [",".join(f"{v:.3f}" for v in slope + rng.normal(size=len(slope)) / 3) for _ in range(dims)]
        rows.append(":".join([*values, labels[i % 2]]))
    text = f"@dimensions {dims}\n@classLabel true down up\n@data\n" + "\n".join(rows)
    pack = {".xz": lzma.compress, ".gz": gzip.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(text.encode()))


@pytest.fixture(scope="module")
def slopes(tmp_path_factory):
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("study")
    written(source / "uea_Slopes_TRAIN.ts.xz", 20, seed=0)
    written(source / "uea_Slopes_TEST.ts", 10, seed=1)
    written(source / "Alone_TRAIN.ts", 4, seed=2)
    return folder, prepare_series(source, folder)


def trial(facts, **options):
    sizes = {"width": 16, "heads": 2, "depth": 2, "rank": 4, "epochs": 3, "attention": "primal+"}
    return SeriesTrial(**{"dataset": "Slopes", "digest": facts[0]["digest"], **sizes, **options})


def test_pairs_of_files_are_found(slopes):
    folder, facts = slopes
    assert [(f["dataset"], f["train"], f["test"], f["classes"], f["dims"], f["length"]) for f in facts] == [
        ("Slopes", 20, 10, 2, 2, 9)
    ]
    assert prepare_series(None, folder) == facts
    assert sorted(path.name for path in folder.iterdir())[0] == f"Slopes-{facts[0]['digest']}.npz"


def test_only_sets_that_are_named_are_read(tmp_path):
    for name in ("A", "B"):
        written(tmp_path / f"{name}_TRAIN.ts", 8, seed=0)
        written(tmp_path / f"{name}_TEST.ts", 4, seed=1)
    (tmp_path / "B_TEST.ts").write_text("nothing")
    out = tmp_path / "out"
    assert [facts["dataset"] for facts in prepare_series(tmp_path, out, ["A"])] == ["A"]
    written(tmp_path / "B_TEST.ts", 4, seed=1)
    assert [facts["dataset"] for facts in prepare_series(tmp_path, out, ["B"])] == ["B"]
    assert [facts["dataset"] for facts in prepare_series(None, out)] == ["A", "B"]  # of both runs
    assert [facts["dataset"] for facts in prepare_series(None, out, ["B"])] == ["B"]
    for source in (tmp_path, None):
        with pytest.raises(ValueError, match="dataset must be one of 'A', 'B', got 'C'"):
            prepare_series(source, out, ["C"])


def test_other_data_have_another_digest(slopes, tmp_path):
    written(tmp_path / "Slopes_TRAIN.ts.gz", 20, seed=0)
    written(tmp_path / "Slopes_TEST.ts", 10, seed=1)
    assert prepare_series(tmp_path, tmp_path / "study") == slopes[1]  # packed otherwise, but the same
    written(tmp_path / "Slopes_TEST.ts", 10, seed=7)
    assert prepare_series(tmp_path, tmp_path / "study")[0]["digest"] != slopes[1][0]["digest"]


def test_what_cannot_be_used_is_told(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(NotADirectoryError, match=r"series must be a folder of \.ts files, got .*none"):
        prepare_series(tmp_path / "none", out)
    with pytest.raises(ValueError, match=r"series need a folder of .ts files: pass it as data \(--data\)"):
        prepare_series(None, out)
    written(tmp_path / "A_TRAIN.ts", 4, seed=0, labels=("up", "up"))
    with pytest.raises(ValueError, match=r"holds no pair of files NAME_TRAIN\.ts and NAME_TEST\.ts"):
        prepare_series(tmp_path, out)
    written(tmp_path / "A_TEST.ts", 4, seed=0)
    with pytest.raises(ValueError, match="A: the test file has classes that do not occur in training: down"):
        prepare_series(tmp_path, out)
    written(tmp_path / "A_TRAIN.ts", 4, seed=0, dims=1)
    with pytest.raises(ValueError, match="A: training has 1 dims, and test 2"):
        prepare_series(tmp_path, out)
    written(tmp_path / "uea_A_TEST.ts.xz", 4, seed=0)
    with pytest.raises(ValueError, match=r"A_TEST\.ts and uea_A_TEST\.ts\.xz are the same part of the same set"):
        prepare_series(tmp_path, out)


def test_published_settings():
    assert published_settings("UWaveGestureLibrary", "primal") == {"rank": 20, "eta": 0.0}
    assert published_settings("Handwriting", "primal+") == {"rank": 20, "eta": 0.5}
    assert published_settings("BasicMotions", "primal") == {"rank": 20, "eta": 0.1}
    assert published_settings("Handwriting", "general") == {"rank": 0, "eta": 0.0}
    assert len(PUBLISHED) == 10


@pytest.mark.slow
def test_protocols(slopes):
    folder, facts = slopes
    held = trial(facts, epochs=6).run(folder, "cpu")
    assert held["learned"] == 16
    assert len(held["curve"]) == 6
    assert held["curve"][held["best_epoch"] - 1] == max(held["curve"])
    shown = trial(facts, epochs=6, protocol="published").run(folder, "cpu")
    assert shown["learned"] == 20
    assert shown["accuracy"] == max(shown["curve"])  # chosen on the test data themselves
    assert shown["last_accuracy"] == shown["curve"][-1]


@pytest.mark.slow
def test_it_learns(slopes):
    folder, facts = slopes
    assert trial(facts, epochs=30, attention="primal").run(folder, "cpu")["accuracy"] > 0.8


def test_heads_divide_the_width(slopes):
    with pytest.raises(ValueError, match="heads must divide width: 2 does not divide 17"):
        trial(slopes[1], width=17)
