"""What differs between two checkpoints, against dense float64 algebra."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

import keyquery as kq
from keyquery.instruments.look.compare import difference
from tests.processes import run


def stack(layers=3, **options):
    return kq.Encoder(24, depth=layers, **{"heads": 4, **options}).double()


def tuned(model, layer=1, head=2, size=0.1):
    """A copy of which the query of one head was changed."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        weight = other.blocks[layer].attention.query.weight
        rank = weight.shape[0] // 4
        weight[head * rank : (head + 1) * rank] += size * torch.randn(rank, 24, dtype=weight.dtype)
    return other


def dense_changes(one, other):
    """‖ΔM‖/‖M‖ and its parts, head by head, from d × d matrices."""
    rows = []
    for before, after in zip(kq.read(one), kq.read(other), strict=True):
        for m1, m2 in zip(*(layer.form.dense().double().flatten(0, -3) for layer in (before, after)), strict=True):
            moved = m2 - m1
            parts = (moved, (moved + moved.mT) / 2, (moved - moved.mT) / 2)
            rows.append([float(part.norm() / m1.norm()) for part in parts])
    return rows


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-7])
def test_changes_are_those_of_dense_matrices(kv_heads, size):
    one = stack(kv_heads=kv_heads)
    other = copy.deepcopy(one)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    rows = kq.compare(one, other).changes[0]["rows"]
    given = [[row["change"], row["symmetric"], row["skew"]] for row in rows]
    assert given == [pytest.approx(cell, rel=1e-6) for cell in dense_changes(one, other)]


def test_only_what_was_changed_has_changed():
    one = stack()
    both = kq.compare(one, tuned(one))
    rows = both.changes[0]["rows"]
    assert [(row["layer"], row["head"]) for row in rows if row["change"]] == [(1, 2)]
    assert (both.ranking()[0]["layer"], both.ranking()[0]["head"]) == (1, 2)
    assert rows[6]["folded"] > 0
    names = both.changes[0]["tensors"]
    assert names["changed"] == ["blocks.1.attention.query"]
    assert len(names["same"]) > 4
    three = kq.compare(one, tuned(one, 0, 0), tuned(one, 2, 3))  # each is held against the first
    assert [three.ranking(number)[0]["layer"] for number in (1, 2)] == [0, 2]
    records = three.records()
    assert [row["change"] for row in records[:12]] == [None] * 12
    assert records[12]["change_skew"] == three.changes[0]["rows"][0]["skew"] > 0
    assert kq.Reading.load(three.to_json()) == three
    former = three.to_dict()  # a file from before changes
    del former["changes"]
    assert kq.Reading.load(json.dumps(former)).ranking() == []


def test_other_rotations_of_the_same_weights_are_noted():
    pytest.importorskip("transformers")
    from keyquery.proof.families import tiny_model

    one = tiny_model("llama")
    other = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    other.load_state_dict(one.state_dict())
    both = kq.compare(one, other)
    assert both.changes[0]["notes"] == ["the rotation of queries and keys differs in some layers"]
    assert not any(row["change"] for row in both.changes[0]["rows"])


class Largest(TorchDispatchMode):
    """The most numbers that any tensor had."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for found in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(found, torch.Tensor):
                self.numbers = max(self.numbers, found.numel())
        return out


def test_no_square_of_the_width_is_formed(tmp_path):
    width = 2048
    for name in ("one", "two"):
        tensors = {f"b.0.{part}": torch.randn(8, width) for part in "qk"}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    options = {"heads": 2, "query": "b.{layer}.q", "key": "b.{layer}.k"}
    one, two = (kq.read(tmp_path / f"{name}.safetensors", **options) for name in ("one", "two"))
    with Largest() as seen:
        found = difference(one, two)
    assert len(found["rows"]) == 2
    assert 8 * width <= seen.numbers < width * width / 8


def test_two_models_are_needed_and_weights_of_each():
    with pytest.raises(ValueError, match="compare needs at least two models, got 1"):
        kq.compare(stack())
    with pytest.raises(ValueError, match="weights must have one entry per look, 2, got 1"):
        kq.compare(stack(), stack(), weights=[kq.read(stack())])


def test_different_shapes_have_no_change():
    both = kq.compare(stack(3), stack(2))
    assert (both.changes[0]["rows"], both.changes[0]["why"]) == (None, "3 attention layers and 2")
    grouped = kq.compare(stack(), stack(kv_heads=2))
    assert grouped.changes[0]["why"] == "layer 0 has 4 heads of width 6 in 24, and 4 heads on 2 keys of width 6 in 24"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("rows", 0, "change"), -1),
        (("rows", 0, "change"), "much"),
        (("rows", 0, "head"), None),
        (("rows",), 3),
        (("tensors",), None),
        (("tensors", "same"), [3]),
        (("of",), None),
    ],
)
def test_changes_of_a_broken_file_are_refused(path, value):
    both = kq.compare(stack(1), stack(1)).to_dict()
    *way, last = path
    at = both["changes"][0]
    for step in way:
        at = at[step]
    at[last] = value
    with pytest.raises(ValueError, match="not a comparison"):
        kq.Reading.load(json.dumps(both))


def test_command_line(tmp_path):
    for name, size in (("base", 0.0), ("fine", 0.5)):
        torch.manual_seed(0)
        tensors = {f"blocks.{i}.attn.qkv.weight": torch.randn(48, 16) for i in range(3)}
        tensors["blocks.1.attn.qkv.weight"][:8] += size
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    output = run("compare", tmp_path / "base", tmp_path / "fine", "--num-heads", 2, "--json", tmp_path / "out.json")
    assert "fine compared with base" in output
    assert "2 of 3 tensors read are identical" in output
    rows = json.loads((tmp_path / "out.json").read_text())["changes"][0]["rows"]
    assert [bool(row["change"]) for row in rows] == [False, False, True, False, False, False]
    assert max(map(len, output.splitlines())) <= 100
