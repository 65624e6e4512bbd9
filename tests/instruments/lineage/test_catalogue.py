"""The catalogue of an index: a cache that is never wrong, and finds what a search of all heads finds."""

import os

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.instruments.lineage import catalogue as module
from keyquery.instruments.lineage.catalogue import NAME, catalogue, catalogue_of
from keyquery.instruments.lineage.fingerprint import PERMUTATIONS, fingerprint
from keyquery.instruments.lineage.index import among, index_files, packed, unpacked


def decoder(seed, noise=0.0):
    torch.manual_seed(seed)
    model = kq.Decoder(64, depth=4, heads=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn_like(parameter) if parameter.ndim > 1 else 0
    return model


@pytest.fixture
def index(tmp_path):
    for seed in range(5):
        (tmp_path / f"{seed}.safetensors").write_bytes(packed(fingerprint(kq.read(decoder(seed)))))
    return tmp_path


def read(index, counted=None):
    def unpack(path):
        counted is not None and counted.append(path.name)
        return unpacked(path)

    return catalogue(index, index_files(index), unpack)[0]


def test_only_files_that_changed_are_read_again(index):
    counted = []
    assert len(read(index, counted).rows) == len(counted) == 5
    read(index, counted)
    assert len(counted) == 5
    (index / "2.safetensors").write_bytes(packed(fingerprint(kq.read(decoder(9)))))
    os.utime(index / "2.safetensors", ns=(1, 1))
    (index / "3.safetensors").unlink()
    assert [row.file for row in read(index, counted).rows] == [f"{seed}.safetensors" for seed in (0, 1, 2, 4)]
    assert counted[5:] == ["2.safetensors"]
    fresh = catalogue_of(unpacked(path) for path in index_files(index))
    assert torch.equal(read(index).gaps, fresh.gaps)
    assert torch.equal(read(index).sketch, fresh.sketch)


@pytest.mark.parametrize("damage", [b"", b"junk", "half", "other rows"])
def test_a_damaged_catalogue_is_built_anew(index, damage):
    right = read(index)
    whole = (index / NAME).read_bytes()
    if damage == "other rows":
        damage = whole.replace(b"safetensors", b"safetensorz", 1)
    (index / NAME).write_bytes(whole[: len(whole) // 2] if damage == "half" else damage)
    assert torch.equal(read(index).gaps, right.gaps)


def test_an_index_that_cannot_be_written_to_is_searched(index, monkeypatch):
    def refused(*_, **__):
        raise PermissionError("read-only")

    monkeypatch.setattr(module, "writing", refused)
    rows = among(decoder(3), index_files(index)).rows
    assert [row["file"].endswith("3.safetensors") for row in rows if row["related"]] == [True]
    assert not (index / NAME).exists()


def test_nearest_models_are_those_of_all_heads_in_full(tmp_path):
    """Ranks by short projections against means of best cosines of whole features."""
    prints = [fingerprint(kq.read(decoder(seed))) for seed in range(30)]
    sought = fingerprint(kq.read(decoder(7, noise=0.2)), PERMUTATIONS)

    def best(other, kind):
        rows = [torch.cat([getattr(layer, kind).flatten(1) for layer in side.layers]) for side in (sought, other)]
        cosines = torch.nn.functional.normalize(rows[0], dim=1) @ torch.nn.functional.normalize(rows[1], dim=1).T
        return float(cosines.amax(1).mean())

    for kind in ("gaps", "sketch"):
        assert int(np.argmax([best(other, kind) for other in prints])) == 7
    nearest, comparable = catalogue_of(prints).nearest(sought, 2)
    assert nearest[0] == 7
    assert comparable == 30


def test_models_of_other_widths_are_not_comparable(index):
    model = kq.Decoder(48, depth=2, heads=2)
    nearest, comparable = read(index).nearest(fingerprint(kq.read(model), PERMUTATIONS), 3)
    assert (nearest, comparable) == ([], 0)
