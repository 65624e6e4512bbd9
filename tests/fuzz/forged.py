"""Files that nobody's program wrote: pickles, packed floods and readings, made up or put into real ones."""

import gzip
import json
import lzma
import pickle
import struct
import zipfile
from functools import cache

from tests.fuzz import mutations as m

ESCAPES = ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\r\x08", "\u202e", "\x1b[6n"]
NAMES = ["builtins bytearray", "builtins eval", "os system", "torch FloatStorage", "torch Tensor", "torch Size"]
NAMES += ["torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch.storage UntypedStorage"]
NAMES += ["collections OrderedDict", "collections Counter", "_codecs encode", "numpy dtype", "numpy ndarray"]
NAMES += ["numpy.core.multiarray _reconstruct", "numpy.core.multiarray scalar", "numpy.core.numeric _frombuffer"]
NAMES += ["torch device", "builtins set", "torch float32", "\x1b[2Jos system", "argparse Namespace"]
VALUES = [0, 1, -1, 255, 2**31 - 1, 2**40, 5 * 10**9, 2**62, 1.5, float("nan"), "", "a", "storage", "cpu", "i8", "O8"]
VALUES += [(), (2,), (2**40,), (0,), b"", b"\0" * 8, None, True, "latin1", "U9", "V8", (1, 2, 3), *ESCAPES]


RARE = 0.004  # of floods that take a second each


def _put(place):
    return b"r" + struct.pack("<I", place)


def _get(place):
    return b"j" + struct.pack("<I", place)


def nested(chance):
    """Lists, tuples or dicts that hold the same ones again and again, or themselves."""
    depth, wide, kind = chance.choice([3, 20, 60, 200]), chance.choice([1, 2, 2, 5]), chance.randrange(4)
    made = b"]" + _put(10_000)
    for level in range(10_001, 10_000 + depth):
        inner, own = _get(level - 1), _put(level)
        pairs = b"".join(b"K" + bytes([i]) + inner for i in range(wide))
        made += (
            b"0]" + own + b"(" + inner * wide + b"e",
            b"0(" + inner * wide + b"t" + own,
            b"0}" + own + b"(" + pairs + b"u",
            b"0]" + own + b"(" + (inner + _get(level)) * wide + b"e",
        )[kind]
    return made


def called(chance):
    """Any name, called with any values, and perhaps given a state."""
    name = chance.choice(NAMES).encode().replace(b" ", b"\n", 1)
    values = b"".join(pickle.dumps(chance.choice(VALUES), 2)[2:-1] for _ in range(chance.choice([0, 1, 1, 2, 3, 5])))
    made = b"c" + name + b"\n(" + values + b"tR"
    if chance.random() < 0.3:
        made += b"(" + b"".join(pickle.dumps(chance.choice(VALUES), 2)[2:-1] for _ in range(5)) + b"tb"
    return made * chance.choice([1, 1, 1, 100])


def opcodes(chance):
    """Opcodes in any order."""
    parts = [b"]", b"}", b")", b"(", b"t", b"e", b"u", b"s", b"a", b"0", b"1", b"2", b"N", b"R", b"b", b"Q", b"\x85"]
    parts += [b"h\x00", b"q\x00", b"K\x07", b"U\x01a", b"\x8a\xff" + b"\x7f" * 255, b"\x8f", b"\x90", b"\x93", b"\x94"]
    parts += [b"T\xff\xff\xff\x7f", b"X\xff\xff\xff\xff", b"\x8e" + b"\xff" * 8, b"I1\n", b"L1L\n", b"cos\nsystem\n"]
    return b"".join(chance.choice(parts) for _ in range(chance.choice([3, 20, 200]))) * chance.choice([1, 1, 1, 500])


def part_of_pickle(chance):
    return chance.choice([nested, called, opcodes])(chance)


def in_pickle(chance, data):
    """A pickle with opcodes put in before a value, or nothing but them."""
    made = part_of_pickle(chance)
    if chance.random() < 0.4:
        return b"\x80\x02}(X\x01\x00\x00\x00w" + made + b"u."
    spots = [at for at in range(2, len(data)) if data[at : at + 1] in (b"X", b"K", b"]", b"}", b"(")]
    at = chance.choice(spots) if spots else 2
    kept = at if chance.random() < 0.5 else at + 1
    return data[:at] + made + data[kept:]


def in_zip(chance, data):
    """The pickle of a torch file, forged; nothing else of it is changed."""
    members = m.members_of(data).items()
    return m.zipped({name: in_pickle(chance, one) if name.endswith(".pkl") else one for name, one in members})


def in_older(chance, data):
    """The same of a torch file of the older format."""
    at, end = data.find(b"state_dict"), data.rfind(b"epoch")
    return data[: at - 6] + in_pickle(chance, data[at - 6 : end]) + (data[end:] if chance.random() < 0.5 else b"")


# Floods


@cache
def flood(pack, unit, size):
    made = unit * (size // len(unit))
    return lzma.compress(made, preset=0) if pack == "xz" else gzip.compress(made, 1)


def flooded(pack):
    """Much in little, as nothing but one unit, or behind the head of a real file."""

    def change(chance, data):
        unit = chance.choice(
            [b" ", b"\n", b",", b"a", b"1,", b":", b"\t\n", b"a b ", b"1 19970101 1 1\n", b"ab,cd,ef,gh\n"]
        )
        size = chance.choice([14 * 2**20, 20 * 2**20]) if chance.random() < RARE else 2**16
        head = data if chance.random() < 0.4 else b""
        return head + flood(pack, unit, size)

    return change


def in_arrays(chance, data):
    """A packed array of zeros, or one that claims more, in the place of one that is there."""
    members = m.members_of(data)
    name = chance.choice(list(members))
    dtype = chance.choice(["<f8", "|u1", "<U0", "|O", "<i8", "|S0"])
    shape = chance.choice([(2**41,), (2**20, 64), (3,)])
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    body = b"\0" * (120 * 2**20 if chance.random() < RARE else chance.choice([0, 24, 2**16]))
    members[name] = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body
    return m.zipped(members, zipfile.ZIP_DEFLATED, compresslevel=1)


# Readings and names


def value(chance):
    """Anything that JSON holds, perhaps within lists or dicts."""
    kind, plain = chance.randrange(9), chance.choice([*m.NUMBERS, 0.5, 1e300, *m.TEXTS, *ESCAPES, None, True, [], {}])
    if kind < 6:
        return plain
    if kind == 6:
        return {chance.choice(["a", "layer", "head", "name", *ESCAPES]): value(chance) for _ in range(3)}
    return [value(chance)] * chance.choice([1, 3, 1000]) if kind == 7 else [value(chance), plain]


def reading(chance, data):
    """A reading of any kind whose fields hold anything; or a real one with some of its numbers and texts forged."""
    from dataclasses import fields

    from keyquery.reading import CLASSES

    roll = chance.random()
    if roll < 0.05:
        inner = chance.choice([b"[[]],", b"{},", b"[{}],", b'{"a":1},']) * chance.choice([100, 100_000, 300_000])
        return b'{"kind": "reading", "schema": 1, "provenance": {"a": [' + inner + b"1]}}"
    if roll < 0.5:
        cls = CLASSES[chance.choice(sorted(CLASSES))]
        made = {f.name: value(chance) for f in fields(cls) if chance.random() < 0.95}
        return json.dumps({"kind": cls.kind, "schema": 1, **made}).encode("utf-8", "surrogatepass")
    node = json.loads(data)
    for _ in range(chance.choice([1, 2, 4])):
        where = chance.choice(m._spots(node, []))
        holder = node
        for key in where[:-1]:
            holder = holder[key]
        if where:
            holder[where[-1]] = value(chance)
    return json.dumps(node).encode("utf-8", "surrogatepass")


def named(chance, data):
    """Escape codes in the names of tensors and in a file's metadata."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    for name in chance.sample(sorted(header), min(3, len(header))):
        at = chance.randrange(len(name) + 1)
        header[name[:at] + chance.choice(ESCAPES) + name[at:]] = header.pop(name)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]
