"""ROxford and RParis from files of their format, made up and small; pickles are data, and nothing in them is run."""

import os
import pickle
import struct
from itertools import pairwise

import numpy as np
import pytest
from scipy.io import savemat

from keyquery.learn.data import load_revisited
from tests.hostile import assert_refused

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
def test_places_are_read_out_of_pickles_of_any_protocol_and_numpy_and_vectors_as_rows_or_columns(tmp_path, protocol):
    truth = written(tmp_path, protocol=protocol)
    np.savez(tmp_path / "rows.npz", Q=Q, X=X)
    savemat(tmp_path / "columns.mat", {"Q": Q.T, "X": X.T})
    for features, old, new in (
        ("rows.npz", b"numpy._core", b"numpy.core"),
        ("columns.mat", b"numpy.core", b"numpy._core"),
    ):
        if protocol == 0:  # whose names have no lengths before them
            truth.write_bytes(truth.read_bytes().replace(old, new))
        found = load_revisited(truth, tmp_path / features)
        assert np.array_equal(found.queries, Q)
        assert np.array_equal(found.database, X)
        assert found.names == tuple(TOLD["imlist"])
        assert found.query_names == tuple(TOLD["qimlist"])
        for group in ("easy", "hard", "junk"):
            assert [row.tolist() for row in getattr(found, group)] == [list(told[group]) for told in TOLD["gnd"]]
    relevant, junk = found.setup("hard")
    assert [row.tolist() for row in relevant] == [[2], [5, 6], [8]]
    assert [row.tolist() for row in junk] == [[0, 1, 3, 4], [0], [7]]


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
        ({**TOLD, "imlist": [1]}, r"imlist must be a list of texts, got \[1\]"),
        ({**TOLD, "gnd": TOLD["gnd"][:2]}, "gnd must be a list with an entry for each of 3 queries"),
        ({**TOLD, "gnd": [{"easy": []}] * 3}, r"gnd\[0\] must have easy, hard, junk"),
        ({**TOLD, "gnd": [{**TOLD["gnd"][0], "hard": [12]}] * 3}, r"gnd\[0\]\['hard'\] must hold .* from 0 to 11"),
    ],
)
def test_truth_that_does_not_fit(tmp_path, told, said):
    np.savez(tmp_path / "vectors.npz", Q=Q, X=X)
    with pytest.raises(ValueError, match=said):
        load_revisited(written(tmp_path, told), tmp_path / "vectors.npz")


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


# Forged files: numbers in plain containers are read, and nothing else is built


def array(dtype, shape, data, fortran=False):
    """The opcodes of an ndarray with a state of one's own."""
    plain = {key: pickle.dumps(value, 2)[2:-1] for key, value in (("shape", shape), ("data", data), ("f", fortran))}
    kind = b"cnumpy\ndtype\n(" + pickle.dumps(dtype, 2)[2:-1] + b"K\x00K\x01tR"
    kind += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    return made + b"(K\x01" + plain["shape"] + kind + plain["f"] + plain["data"] + b"tb"


def forged(folder, easy):
    """A file of truth whose first easy places are these opcodes."""
    whole = pickle.dumps({**TOLD, "gnd": [{**one, "easy": "EASY"} for one in TOLD["gnd"]]}, 2)
    mark = b"X\x04\x00\x00\x00EASY"
    at = whole.index(mark)
    (folder / "gnd.pkl").write_bytes(whole[:at] + easy + whole[at + len(mark) :])
    np.savez(folder / "vectors.npz", Q=Q, X=X)
    return folder


def shared_lists():
    """2⁴⁰ places in a few bytes, by places of the memo that no other part of the file uses."""
    places = [struct.pack("<I", 1000 + i) for i in range(41)]
    levels = [b"]r" + new + b"(j" + old + b"j" + old + b"e" for old, new in pairwise(places)]
    return b"]r" + places[0] + b"K\x00a0" + b"0".join(levels)


HOSTILE = {
    "objects over raw bytes": (array("O8", (1,), b"\x41" * 8), "array of 'O8'"),
    "more than its bytes": (array("i8", (2 * 10**9,), b"\x00" * 8), "in 8 bytes"),
    "items without size": (array("S0", (2**40,), b""), "array of 'S0'"),
    "a negative shape": (array("i8", (-1,), b"\x00" * 8), "not made of bytes"),
    "shared lists": (shared_lists(), "shared containers expand to more than"),
    "bytearray": (b"cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85R", "names builtins.bytearray"),
    "a dtype of one's own": (b"cnumpy\ndtype\n(" + pickle.dumps([("a", "O")], 2)[2:-1] + b"tR", "array of"),
    "strides": (array("i8", (2,), b"\x00" * 16).replace(b"K\x01", b"K\x01(K\x00tK\x01", 1), "not a pickle of arrays"),
}


@pytest.mark.unchecked
@pytest.mark.parametrize("case", HOSTILE)
def test_forged_truth_is_refused(case, tmp_path):
    opcodes, words = HOSTILE[case]
    folder = forged(tmp_path, opcodes)
    assert_refused(lambda: load_revisited(folder / "gnd.pkl", folder / "vectors.npz"), words, growth=64)


def test_an_array_by_hand_is_read(tmp_path):
    folder = forged(tmp_path, array("i8", (2,), struct.pack("<2q", 3, 4).decode("latin1")))
    assert load_revisited(folder / "gnd.pkl", folder / "vectors.npz").easy[0].tolist() == [3, 4]


@pytest.mark.unchecked
def test_vectors_that_say_they_are_large_are_refused(tmp_path):
    folder = forged(tmp_path, b"]")
    savemat(folder / "a.mat", {"Q": Q, "X": np.zeros((12, 2**21))}, do_compression=True)
    assert_refused(lambda: load_revisited(folder / "gnd.pkl", folder / "a.mat"), "have more than")
    np.savez_compressed(folder / "a.npz", Q=Q, X=np.zeros((12, 2**21)))
    assert_refused(lambda: load_revisited(folder / "gnd.pkl", folder / "a.npz"), "decompresses to more than", growth=64)
