"""The atlas: readings that load and are whole, a page of one, and inputs that the script cuts as it says."""

import sys
from pathlib import Path

import pytest

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.show.triangle import dots

ATLAS = Path(__file__).parents[1] / "docs" / "atlas"

NAMES = [path.name.removesuffix(".json.xz") for path in sorted(ATLAS.glob("*.json.xz"))]


@pytest.fixture(scope="module")
def make():
    sys.path.insert(0, str(ATLAS))
    try:
        import make

        return make
    finally:
        sys.path.remove(str(ATLAS))


SHIPPED = ("encoder", "decoder")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name not in SHIPPED]


@pytest.mark.parametrize("name", [*SHIPPED, *OTHERS])
def test_a_reading_is_whole(name):
    look = kq.Reading.load(ATLAS / f"{name}.json.xz")
    assert look.model["heads"] == len(look.heads) == len(dots(look))
    assert look.model["layers"] == len(look.layers)
    for head in look.heads:
        assert -1 <= head["raw"]["symmetry"] <= 1
        if head["on_data"]:
            shares = [head["on_data"][part] for part in (*PARTS, "interaction")]
            assert min(shares[:5]) >= -0.05  # unbiased estimates can fall below 0
            assert sum(shares) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_the_readings_of_what_ships_are_those_of_today(make):
    kept = kq.Reading.load(ATLAS / "encoder.json.xz")
    anew = make.kept(make.MODELS["encoder"](Path()))
    assert kept.provenance["tensors"] == anew.provenance["tensors"]
    for one, other in zip(kept.heads, anew.heads, strict=True):
        assert one["raw"]["symmetry"] == pytest.approx(other["raw"]["symmetry"], abs=1e-3)
        assert one["on_data"]["popularity"] == pytest.approx(other["on_data"]["popularity"], abs=1e-3)


def test_every_model_has_its_reading_and_its_place(make):
    text = ATLAS.with_suffix(".md").read_text()
    assert set(NAMES) == set(make.MODELS)
    assert all(f"(atlas/{name}.html)" in text for name in NAMES)


def test_reactions_and_antibodies_are_cut_into_words(make):
    assert make.REACTION.findall("C[Mg]Br.Cl>>c1") == ["C", "[Mg]", "Br", ".", "Cl", ">>", "c", "1"]
    assert all("".join(words[1:-1]).count(">>") == 1 for words in make.reactions())
    writing, reading = make.antibodies(generates=True), make.antibodies(generates=False)
    assert [words[2:] for words in writing] == [words[1:] for words in reading]
    assert {words[0] for words in writing} == {"[HEAVY]", "[LIGHT]"}


def test_an_onnx_file_gives_up_its_backbone(make, tmp_path):
    """Written here field by field: two named vectors, a nameless matrix that a node names, positions in two pieces."""
    from onnx_file import read_backbone

    def field(number, data):
        return bytes([number << 3 | 2]) + size(len(data)) + data

    def size(number):
        low, high = number & 127, number >> 7
        return bytes([low | 128]) + size(high) if high else bytes([low])

    def tensor(name, values, *sizes):
        shape = b"".join(bytes([1 << 3]) + size(n) for n in sizes)
        return field(5, shape + bytes([2 << 3, 1]) + field(8, name.encode()) + field(9, values.numpy().tobytes()))

    torch = make.torch
    matrix, places = torch.arange(6.0).view(2, 3), torch.randn(1, 201, 4)
    node = field(1, field(1, b"x") + field(1, b"onnx::MatMul_7") + field(3, b"/backbone/encoder/fc1/MatMul"))
    graph = tensor("backbone.embeddings.cls_token", torch.ones(4), 1, 1, 4) + tensor("head.bias", torch.ones(4), 4)
    graph += tensor("onnx::MatMul_7", matrix, 2, 3) + node
    graph += tensor("onnx::Reshape_2", places[:, 1:], 1, 200, 4) + tensor("onnx::Concat_1", places[:, :1], 1, 1, 4)
    (tmp_path / "model.onnx").write_bytes(field(7, graph))
    found = read_backbone(tmp_path / "model.onnx")
    assert found.keys() == {"embeddings.cls_token", "encoder.fc1.weight", "embeddings.position_embeddings"}
    assert torch.equal(found["encoder.fc1.weight"], matrix.T)
    assert torch.equal(found["embeddings.position_embeddings"], places)
