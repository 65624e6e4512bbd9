"""ROxford and RParis from files of their format, made up and small; pickles are data, and nothing in them is run."""

import os
import pickle

import numpy as np
import pytest
from scipy.io import savemat

from keyquery.learn.data import load_revisited

RNG = np.random.default_rng(0)
Q, X = RNG.normal(size=(3, 8)).astype(np.float32), RNG.normal(size=(12, 8)).astype(np.float32)
TOLD = {
    "imlist": [f"oxford_{i:06d}" for i in range(12)],
    "qimlist": [f"all_souls_{i:06d}" for i in range(3)],
    "gnd": [
        {"bbx": [1.5, 2.0, 30.0, 40.0], "easy": np.array([0, 1]), "hard": np.array([2]), "junk": np.array([3, 4])},
        {"bbx": np.ones(4), "easy": np.array([], int), "hard": np.array([5, 6]), "junk": np.array([0])},
        {"bbx": np.ones(4), "easy": [7], "hard": [8], "junk": []},
    ],
}


def written(folder, told=TOLD, protocol=2):
    path = folder / "gnd_roxford5k.pkl"
    path.write_bytes(pickle.dumps(told, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_places_are_read_out_of_pickles_of_any_protocol(tmp_path, protocol):
    np.savez(tmp_path / "vectors.npz", Q=Q, X=X)
    found = load_revisited(written(tmp_path, protocol=protocol), tmp_path / "vectors.npz")
    assert found.names == tuple(TOLD["imlist"])
    assert found.query_names == tuple(TOLD["qimlist"])
    for group in ("easy", "hard", "junk"):
        for one, told in zip(getattr(found, group), TOLD["gnd"], strict=True):
            assert one.tolist() == list(told[group])
    relevant, junk = found.setup("hard")
    assert [one.tolist() for one in relevant] == [[2], [5, 6], [8]]
    assert [one.tolist() for one in junk] == [[0, 1, 3, 4], [0], [7]]


def test_names_of_old_and_new_numpy_are_read(tmp_path):
    path = written(tmp_path, protocol=0)
    data = path.read_bytes()
    np.savez(tmp_path / "vectors.npz", Q=Q, X=X)
    for old, new in ((b"numpy._core", b"numpy.core"), (b"numpy.core", b"numpy._core")):
        path.write_bytes(data.replace(old, new))
        assert load_revisited(path, tmp_path / "vectors.npz").easy[0].tolist() == [0, 1]


def test_vectors_are_rows_or_columns_of_several_kinds_of_file(tmp_path):
    truth = written(tmp_path)
    np.savez(tmp_path / "rows.npz", Q=Q, X=X)
    savemat(tmp_path / "columns.mat", {"Q": Q.T, "X": X.T})
    for name in ("rows.npz", "columns.mat"):
        found = load_revisited(truth, tmp_path / name)
        assert np.array_equal(found.queries, Q)
        assert np.array_equal(found.database, X)


class Evil:
    """What a pickle can do."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("protocol", [0, 4])
def test_a_pickle_that_would_run_something_is_refused(tmp_path, protocol):
    path = written(tmp_path, {**TOLD, "extra": Evil(str(tmp_path / "made"))}, protocol)
    with pytest.raises(ValueError, match=r"is not a pickle of arrays and plain containers: it names \w+\.mkdir"):
        load_revisited(path, tmp_path)
    assert not (tmp_path / "made").exists()
    for code in (b"cbuiltins\neval\n(S'1'\ntR.", b"cnumpy\nload\n(S'x'\ntR.", b"\x80\x04junk", b""):
        path.write_bytes(code)
        with pytest.raises(ValueError, match="is not a pickle of arrays and plain containers"):
            load_revisited(path, tmp_path)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([1, 2], "must hold imlist, qimlist and gnd"),
        ({**TOLD, "gnd": TOLD["gnd"][:2]}, "gnd must be a list with an entry for each of 3 queries"),
        ({**TOLD, "gnd": [{"easy": []}] * 3}, r"gnd\[0\] must have easy, hard, junk"),
        (
            {**TOLD, "gnd": [*TOLD["gnd"][:2], {"easy": [12], "hard": [], "junk": []}]},
            r"gnd\[2\]\['easy'\] must hold image indices from 0 to 11",
        ),
    ],
)
def test_truth_that_does_not_fit(tmp_path, told, said):
    with pytest.raises(ValueError, match=said):
        load_revisited(written(tmp_path, told), tmp_path)


def test_features_that_do_not_fit(tmp_path):
    truth = written(tmp_path)
    cases = [
        ({"Q": Q}, r"must hold Q \(queries\) and X \(database\); X is missing"),
        ({"Q": Q, "X": X[:9]}, r"X must have 12 vectors as rows or columns, got float32 \(9, 8\)"),
        ({"Q": Q[:, :5], "X": X}, "Q and X must have the same dim, got 5 and 8"),
        ({"Q": Q.astype(int), "X": X}, r"Q must have 3 vectors as rows or columns, got int64"),
    ]
    for arrays, said in cases:
        np.savez(tmp_path / "vectors.npz", **arrays)
        with pytest.raises(ValueError, match=said):
            load_revisited(truth, tmp_path / "vectors.npz")
    (tmp_path / "vectors.mat").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"is not a \.mat file that scipy can read"):
        load_revisited(truth, tmp_path / "vectors.mat")
    with pytest.raises(ValueError, match=r"features must be an \.npz or \.mat file"):
        load_revisited(truth, truth)
