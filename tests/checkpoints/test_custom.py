"""Weights that the user names: every layout gives the same heads, and what does not fit is refused."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli

HEADS, R, D = 4, 3, 20
FUSED = ("fused", "fused-transposed", "fused-heads")


@pytest.fixture
def weights():
    """Query, key and value, (heads, r, d)."""
    return torch.randn(3, HEADS, R, D)


def stored(layout, weights):
    """The tensors of one layer in a layout, by name."""
    query, key, _ = weights
    match layout:
        case "linear":
            found = {"q": query.flatten(0, 1), "k": key.flatten(0, 1)}
        case "transposed":
            found = {"q": query.flatten(0, 1).mT, "k": key.flatten(0, 1).mT}
        case "heads":
            found = {"q": query.mT, "k": key.mT}
        case "heads-linear":
            found = {"q": query, "k": key}
        case "columns":
            found = {"q": query.permute(2, 0, 1), "k": key.permute(2, 0, 1)}
        case "fused":
            found = {"qkv": weights.flatten(0, 2)}
        case "fused-transposed":
            found = {"qkv": weights.flatten(0, 2).mT}
        case "fused-heads":
            found = {"qkv": weights.transpose(0, 1).flatten(0, 2)}
    return {f"blocks.0.{name}.weight": tensor.contiguous() for name, tensor in found.items()}


def names(layout):
    if layout in FUSED:
        return {"query": "blocks.{layer}.qkv.weight"}
    return {"query": "blocks.{layer}.q.weight", "key": "blocks.{layer}.k.weight"}


def write(folder, tensors, **config):
    save_file(tensors, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("layout", ["linear", "transposed", "heads", "heads-linear", "columns", *FUSED])
def test_every_layout_gives_the_same_heads(layout, weights, tmp_path):
    folder = write(tmp_path, stored(layout, weights), hidden_size=D, num_attention_heads=HEADS, head_dim=R)
    form = kq.read(folder, layout=layout, **names(layout))[0].form
    query, key, _ = weights
    torch.testing.assert_close(form.dense(), query.mT @ key)


QKV = "blocks.{layer}.qkv.weight"
REFUSED = [  # how it is stored, the config, what is asked, and what the error says
    ("heads", {}, {"layout": "heads", "heads": 3}, "heads is 3, but blocks.0.q.weight of shape (4, 20, 3) says 4"),
    ("heads", {}, {}, "has the shape (4, 20, 3), which is not layout 'linear'"),
    ("fused", {}, {"query": QKV, "key": QKV}, "query and key both name"),
    (
        "transposed",
        {"hidden_size": D},
        {},
        "(20, 12) would be 12 wide as layout 'linear', (heads·r, d), but the config's",
    ),
    ("linear", {"num_attention_heads": 4}, {"heads": 2}, "heads is 2, but the config's num_attention_heads says 4"),
    ("linear", {"head_dim": 6}, {}, "holds 4 heads of width 3, but the config's head_dim is 6"),
    ("heads", {"head_dim": 6}, {"layout": "heads"}, "holds 4 heads of width 3, but the config's head_dim is 6"),
    ("linear", {}, {"layout": "sideways"}, "layout must be one of"),
    ("linear", {}, {"key": None}, "query and key patterns go together"),
    ("linear", {}, {"layout": "fused"}, "is of one tensor, but key names another"),
    ("linear", {}, {"layout": "heads", "query": None, "key": None}, "layout needs query and key"),
]


@pytest.mark.parametrize(("layout", "config", "asked", "words"), REFUSED)
def test_what_does_not_fit_is_refused(layout, config, asked, words, weights, tmp_path):
    folder = write(tmp_path, stored(layout, weights), **config)
    with pytest.raises(ValueError, match=re.escape(words)):
        _ = kq.read(folder, **{"heads": HEADS, **names("linear"), **asked})[0]


MEANT = {  # tensors of other libraries, and the options that are proposed
    "megatron": ({"layers.0.self_attention.linear_qkv.weight": (36, D)}, "linear_qkv.weight' --layout fused-heads"),
    "torchtune": (
        {"layers.0.attn.q_proj.weight": (12, D), "layers.0.attn.k_proj.weight": (12, D)},
        "--query 'layers.{layer}.attn.q_proj.weight' --key 'layers.{layer}.attn.k_proj.weight' --num-heads N",
    ),
    "flax, dense": (
        {"layers.0.self.query.kernel": (D, 12), "layers.0.self.key.kernel": (D, 12)},
        "--key 'layers.{layer}.self.key.kernel' --layout transposed",
    ),
    "flax, by head": (
        {"layers.0.self.query.kernel": (D, 4, 3), "layers.0.self.key.kernel": (D, 4, 3)},
        "--key 'layers.{layer}.self.key.kernel' --layout columns",
    ),
}


@pytest.mark.parametrize("case", MEANT)
def test_layouts_of_other_libraries_get_their_options_proposed(case, tmp_path):
    shapes, proposed = MEANT[case]
    folder = write(tmp_path, {f"net.{name}": torch.randn(shape) for name, shape in shapes.items()})
    with pytest.raises(ValueError, match="this layout is not known") as raised:
        kq.read(folder)
    assert proposed in str(raised.value).replace("net.", "")


def test_a_transposed_matrix_does_not_fit_the_embeddings(weights, tmp_path):
    folder = write(tmp_path, {**stored("transposed", weights), "wte.weight": torch.randn(50, D)})
    with pytest.raises(ValueError, match=r"but the width of wte\.weight is 20"):
        kq.read(folder, heads=HEADS, **names("linear"))
    assert kq.read(folder, heads=HEADS, layout="transposed", **names("linear"))[0].form.dim == D


def test_keys_that_are_the_queries_can_be_said_to_be(weights, tmp_path):
    folder = write(tmp_path, stored("linear", weights))
    tied = {"query": "blocks.{layer}.q.weight", "key": "blocks.{layer}.q.weight"}
    assert kq.read(folder, heads=HEADS, layout="linear", **tied)[0].form.symmetry.tolist() == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("layout", ["heads", "fused-transposed"])
def test_command_line_takes_a_layout(layout, tmp_path, weights):
    folder = write(tmp_path, stored(layout, weights), head_dim=R, hidden_size=D)
    patterns = [part for name, value in names(layout).items() for part in (f"--{name}", value)]
    arguments = ["look", str(folder), *patterns, "--num-heads", "4"]
    result = CliRunner().invoke(cli.app, [*arguments, "--layout", layout])
    assert result.exit_code == 0, result.output
    assert "1 layer, 4 heads, width 20" in " ".join(result.output.split())
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code != 0
    assert "--layout" in str(result.exception)


def test_an_unknown_layout_suggests_what_looks_like_queries_and_keys(tmp_path):
    names = [f"stack.{layer}.mixer.to_{one}.weight" for layer in (0, 1) for one in "qkv"]
    save_file({name: torch.randn(8, 8) for name in names}, tmp_path / "odd.safetensors")
    patterns = "stack.{layer}.mixer.to_q.weight", "stack.{layer}.mixer.to_k.weight"
    with pytest.raises(ValueError, match=re.escape(f"perhaps by --query {patterns[0]!r} --key {patterns[1]!r}")):
        kq.read(tmp_path / "odd.safetensors")
    heads = kq.read(tmp_path / "odd.safetensors", query=patterns[0], key=patterns[1], heads=2)
    assert len(heads) == 2
    assert "every key counts as visible" in heads[0].notes[0]  # no mask, norm or position is known
