"""Ground truth of image retrieval, forged: numbers in plain containers are read, and nothing else is built."""

import pickle
import struct
from itertools import pairwise

import numpy as np
import pytest
from scipy.io import savemat

from keyquery.learn.data import load_revisited
from tests.hostile import assert_refused
from tests.learn.data.test_retrieval import TOLD, Q, X


def array(dtype, shape, data, fortran=False):
    """The opcodes of an ndarray with a state of one's own."""
    plain = {key: pickle.dumps(value, 2)[2:-1] for key, value in (("shape", shape), ("data", data), ("f", fortran))}
    kind = b"cnumpy\ndtype\n(" + pickle.dumps(dtype, 2)[2:-1] + b"K\x00K\x01tR"
    kind += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    return made + b"(K\x01" + plain["shape"] + kind + plain["f"] + plain["data"] + b"tb"


def truth(folder, easy):
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
    folder = truth(tmp_path, opcodes)
    assert_refused(lambda: load_revisited(folder / "gnd.pkl", folder / "vectors.npz"), words, growth=64)


def test_an_array_by_hand_is_read(tmp_path):
    folder = truth(tmp_path, array("i8", (2,), struct.pack("<2q", 3, 4).decode("latin1")))
    assert load_revisited(folder / "gnd.pkl", folder / "vectors.npz").easy[0].tolist() == [3, 4]


@pytest.mark.unchecked
def test_vectors_that_say_they_are_large_are_refused(tmp_path):
    folder = truth(tmp_path, b"]")
    savemat(folder / "a.mat", {"Q": Q, "X": np.zeros((12, 2**21))}, do_compression=True)
    assert_refused(lambda: load_revisited(folder / "gnd.pkl", folder / "a.mat"), "have more than")
    np.savez_compressed(folder / "a.npz", Q=Q, X=np.zeros((12, 2**21)))
    assert_refused(lambda: load_revisited(folder / "gnd.pkl", folder / "a.npz"), "decompresses to more than", growth=64)
