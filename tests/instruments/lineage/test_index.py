"""An index of fingerprints: small files, found relatives, and refusals."""

import copy
import re

import pytest
import torch
from safetensors.torch import save_file

import keyquery as kq
from keyquery.instruments.lineage.fingerprint import Fingerprint, LayerPrint, fingerprint
from keyquery.instruments.lineage.index import among, index_files, packed, unpacked
from keyquery.reading import Reading
from tests.processes import refusal, run


def decoder(seed):
    torch.manual_seed(seed)
    return kq.Decoder(64, depth=4, heads=4)


def large(layers, heads, width, planes):
    """A fingerprint of random numbers."""
    draw = torch.Generator().manual_seed(0)

    def layer(index):
        gaps = torch.randn(heads, 4, width - 1, generator=draw)
        return LayerPrint(index, 4096, width, gaps, torch.randn(heads, planes), torch.randn(heads, 256, generator=draw))

    return Fingerprint("large", [layer(index) for index in range(layers)])


@pytest.mark.parametrize("shape", [(32, 32, 128, 64), (80, 64, 128, 64), (12, 12, 64, 32)])
def test_files_are_small(shape, tmp_path):
    path = tmp_path / "large.safetensors"
    path.write_bytes(packed(large(*shape)))
    assert path.stat().st_size <= 200_000
    assert unpacked(path).layers[0].width == shape[2]


def test_what_is_kept_is_what_was_there(tmp_path):
    whole = fingerprint(kq.read(decoder(0)))
    (tmp_path / "a").write_bytes(packed(whole))
    for kept, layer in zip(unpacked(tmp_path / "a").layers, whole.layers, strict=True):
        assert (kept.gaps / 30 - layer.gaps).abs().max() < 0.02
        cosines = torch.nn.functional.cosine_similarity(kept.sketch, layer.sketch)
        assert cosines.min() > 0.999


def test_relatives_are_found_among_others_and_damaged_files_are_left_out(tmp_path):
    (tmp_path / "0.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        index_files(tmp_path)
    for seed in range(1, 7):
        (tmp_path / f"{seed}.safetensors").write_bytes(packed(fingerprint(kq.read(decoder(seed)))))
    (tmp_path / "7.safetensors").write_bytes((tmp_path / "1.safetensors").read_bytes()[:900])
    model = copy.deepcopy(decoder(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter) if parameter.ndim > 1 else 0
    reading = among(model, index_files(tmp_path))
    assert [row["file"].endswith("3.safetensors") for row in reading.rows if row["related"]] == [True]
    assert (reading.searched, reading.comparable, len(reading.skipped)) == (6, 6, 2)
    assert all("is not a fingerprint" in why for why in reading.skipped)


def test_models_that_cannot_be_read_are_left_out(tmp_path):
    (tmp_path / "good").symlink_to(kq.models.DECODER)
    (tmp_path / "bad").mkdir()
    save_file({"fc.weight": torch.ones(4, 4)}, tmp_path / "bad" / "model.safetensors")
    with pytest.warns(UserWarning, match="left out"):
        assert "1 searched" in run("lineage", kq.models.DECODER, "--among", tmp_path)
    (tmp_path / "good").unlink()
    assert "can be compared" in refusal("lineage", kq.models.DECODER, "--among", tmp_path)


def test_commands(tmp_path):
    models, index = tmp_path / "models", tmp_path / "index"
    for name in ("DECODER", "ENCODER"):
        (models / name).parent.mkdir(exist_ok=True)
        (models / name).symlink_to(getattr(kq.models, name))
    run("lineage", "--index", index, kq.models.DECODER, kq.models.ENCODER)
    assert len(list(index.iterdir())) == 2
    for place in (index, models):
        run("lineage", kq.models.DECODER, "--among", place, "--json", tmp_path / "a.json", "--force")
        rows = Reading.load(tmp_path / "a.json").records()
        assert [row["related"] for row in rows] == [True, False][: len(rows)]
    page = tmp_path / "a.html"
    run("lineage", kq.models.DECODER, kq.models.DECODER, "--html", page, "--csv", tmp_path / "a.csv")
    assert "identical" in page.read_text()


@pytest.mark.parametrize("arguments", [["a"], ["a", "b", "--among", "."], ["a", "--index", "x", "--among", "."]])
def test_wrong_arguments(arguments):
    assert re.search(r"expected|--index", refusal("lineage", *arguments))
