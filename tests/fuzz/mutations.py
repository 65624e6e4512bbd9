"""One engine of mutations: bytes in, hostile bytes out, all chance from one `random.Random`.

A file is changed as bytes, or inside its own container: the JSON in a safetensors header, the pickle in a zip, the
text in a .gz. Without that, checksums and lengths would turn most changes away at the door.
"""

import copy
import gzip
import io
import json
import re
import struct
import zipfile

NUMBERS = [0, 1, -1, 2, 7, 255, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1, 10**12, 10**30]
FLOATS = [0.5, -0.0, 1e308, 1e-320, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", "\0", "../../etc/passwd", "/etc/passwd", "C:\\x", "%s%n{0}{layer}", "<script>window.hurt = 1</script>"]
TEXTS += ["\x1b[2J\x1b]0;title\x07", "\ud800", "a" * 5000, "²", "٣", "NaN", "1" * 5000]
ODD = [*NUMBERS, *FLOATS, *TEXTS, None, True, False, [], {}, [[]], {"": None}, [0] * 50]
PIECES = [b"\0", b"\xff", b"\xff" * 8, b"\n", b"\r", b",", b":", b'"', b"'", b"@", b"?", b"\t", b"{", b"}", b"[", b"e9"]


def number(chance):
    """A length that does not fit."""
    return chance.choice(NUMBERS) if chance.random() < 0.7 else chance.getrandbits(chance.choice([8, 16, 32, 63]))


def as_bytes(chance, data):
    """A few changes of bytes, anywhere, more of them near the start."""
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 3, 8])):
        size = len(data)
        at = chance.randrange(size + 1) if chance.random() < 0.5 else chance.randrange(min(size, 200) + 1)
        end = min(size, at + chance.choice([1, 2, 4, 8, 16, 100]))
        kind = chance.randrange(9)
        if kind == 0:
            data[at:end] = bytes(chance.getrandbits(8) for _ in range(end - at))
        elif kind == 1 and at < size:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            del data[at:end]
        elif kind == 3:
            data[at:at] = data[at:end] * chance.choice([1, 2, 50])
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            data[at:at] = chance.choice(PIECES) * chance.choice([1, 3, 100])
        elif kind == 6:
            data[at : at + 8] = struct.pack("<Q", number(chance) % 2**64)
        elif kind == 7:
            data[at : at + 4] = struct.pack("<I", number(chance) % 2**32)
        else:
            other = chance.randrange(size + 1)
            data[at:end] = data[other : other + end - at]
    return bytes(data)


def as_text(chance, data):
    """Numbers and lines of a text, and its bytes."""
    kind = chance.randrange(4)
    if kind == 0:
        found = list(re.finditer(rb"-?\d+(\.\d+)?", data))
        if found:
            one = chance.choice(found)
            new = str(chance.choice([*NUMBERS, *FLOATS])).encode() if chance.random() < 0.8 else b"1_0"
            return data[: one.start()] + new + data[one.end() :]
    if kind == 1:
        lines = data.split(b"\n")
        at = chance.randrange(len(lines))
        what = chance.randrange(3)
        if what == 0:
            del lines[at]
        elif what == 1:
            lines[at:at] = [lines[chance.randrange(len(lines))]] * chance.choice([1, 100])
        else:
            lines[at] = lines[at] * chance.choice([2, 40])
        return b"\n".join(lines)
    if kind == 2:
        text = chance.choice(TEXTS).encode("utf-8", "surrogatepass")
        at = chance.randrange(len(data) + 1)
        return data[:at] + text + data[at:]
    return as_bytes(chance, data)


def _spots(node, found, where=()):
    found.append(where)
    if isinstance(node, dict | list) and len(found) < 300 and len(where) < 12:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            _spots(value, found, (*where, key))
    return found


def as_plain(chance, node):
    """Plain data with some of its values replaced, dropped, renamed, doubled or buried."""
    for _ in range(chance.choice([1, 1, 2, 4])):
        where = chance.choice(_spots(node, []))
        if not where:
            if chance.random() < 0.1:
                return copy.deepcopy(chance.choice(ODD))
            continue
        holder = node
        for key in where[:-1]:
            holder = holder[key]
        key, kind = where[-1], chance.randrange(8)
        if kind < 4:
            holder[key] = copy.deepcopy(chance.choice(ODD))
        elif kind == 4:
            del holder[key]
        elif kind == 5 and isinstance(holder, dict):
            holder[chance.choice(TEXTS)] = holder.pop(key)
        elif kind == 6 and not isinstance(holder[key], list):
            holder[key] = [copy.deepcopy(holder[key]) for _ in range(chance.choice([1, 2, 100]))]
        else:
            inside = holder[key]
            for _ in range(chance.choice([1, 5, 5, 60])):  # deeper ones are written by hand
                inside = [inside]
            holder[key] = inside
    return node


def written(node):
    """JSON, also of what JSON should not hold; deep nesting by hand."""
    try:
        return json.dumps(node).encode("utf-8", "surrogatepass")
    except RecursionError:
        return deep(b"null")


def deep(text, times=100_000):
    """JSON inside so many lists."""
    return b"[" * times + text + b"]" * times


def as_json(chance, data):
    """JSON: its values, or as a text."""
    kind = chance.random()
    if kind < 0.02:
        return data.replace(b": ", b": " + deep(b"", chance.choice([500, 2000, 100_000])) + b', "": ', 1)
    return as_text(chance, data) if kind < 0.3 else written(as_plain(chance, json.loads(data)))


def as_safetensors(chance, data):
    """The header and what it says, or the bytes."""
    if chance.random() < 0.4:
        return as_bytes(chance, data)
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    said = header.get("__metadata__", {}).get("keyquery")
    if said and chance.random() < 0.7:  # the facts of an estimator: JSON in JSON
        header["__metadata__"]["keyquery"] = as_json(chance, said.encode()).decode("utf-8", "replace")
        text = written(header)
    else:
        text = as_json(chance, json.dumps(header).encode())
    claimed = len(text) if chance.random() < 0.9 else number(chance) % 2**64
    return struct.pack("<Q", claimed) + text + data[8 + size :]


def as_zip(chance, data):
    """A member, packed up again with its right checksum; or the bytes."""
    if chance.random() < 0.3:
        return as_bytes(chance, data)
    members = members_of(data)
    small = [name for name in members if len(members[name]) < 20_000] or list(members)
    name = chance.choice([name for name in small if name.endswith((".pkl", ".npy"))] or small)
    members[name] = as_bytes(chance, members[name])
    return zipped(members, zipfile.ZIP_DEFLATED if chance.random() < 0.1 else zipfile.ZIP_STORED)


def members_of(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def zipped(members, *options, **more):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", *options, **more) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return made.getvalue()


def as_gzip(chance, data):
    """A text inside a packed file, or the bytes."""
    if chance.random() < 0.4:
        return as_bytes(chance, data)
    return gzip.compress(as_text(chance, gzip.decompress(data)), 1)
