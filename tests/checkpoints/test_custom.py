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


@pytest.mark.parametrize("layout", ["linear", "transposed", "heads", "heads-linear", *FUSED])
def test_every_layout_gives_the_same_heads(layout, weights, tmp_path):
    folder = write(tmp_path, stored(layout, weights), hidden_size=D, num_attention_heads=HEADS, head_dim=R)
    form = kq.read(folder, layout=layout, **names(layout))[0].form
    query, key, _ = weights
    torch.testing.assert_close(form.dense(), query.mT @ key)


def test_heads_of_a_tensor_by_head_are_counted(weights, tmp_path):
    folder = write(tmp_path, stored("heads", weights))
    assert kq.read(folder, layout="heads", **names("heads"))[0].heads == HEADS
    with pytest.raises(ValueError, match=r"heads is 3, but blocks\.0\.q\.weight of shape \(4, 20, 3\) says 4"):
        kq.read(folder, heads=3, layout="heads", **names("heads"))


def test_a_tensor_by_head_is_no_matrix(weights, tmp_path):
    folder = write(tmp_path, stored("heads", weights))
    with pytest.raises(
        ValueError, match=r"has the shape \(4, 20, 3\), which is not layout 'linear'.*heads: \(heads, d"
    ):
        kq.read(folder, heads=HEADS, **names("heads"))
    with pytest.raises(ValueError, match="which is not layout 'linear'"):
        kq.look(folder, heads=HEADS, **names("heads"))


def test_a_fused_tensor_given_as_both_is_refused(weights, tmp_path):
    folder = write(tmp_path, stored("fused", weights))
    both = {"query": "blocks.{layer}.qkv.weight", "key": "blocks.{layer}.qkv.weight"}
    with pytest.raises(ValueError, match=r"query and key both name .*--layout fused"):
        kq.read(folder, heads=HEADS, **both)
    assert kq.read(folder, heads=HEADS, layout="fused", config={"head_dim": R}, **both)[0].form.batch == (HEADS,)


def test_keys_that_are_the_queries_can_be_said_to_be(weights, tmp_path):
    folder = write(tmp_path, stored("linear", weights))
    tied = {"query": "blocks.{layer}.q.weight", "key": "blocks.{layer}.q.weight"}
    assert kq.read(folder, heads=HEADS, layout="linear", **tied)[0].form.symmetry.tolist() == pytest.approx([1.0] * 4)


def test_a_transposed_matrix_does_not_fit_the_config(weights, tmp_path):
    folder = write(tmp_path, stored("transposed", weights), hidden_size=D, num_attention_heads=HEADS)
    with pytest.raises(ValueError, match=r"\(20, 12\) would be 12 wide .* but the config's hidden_size is 20"):
        kq.read(folder, **names("linear"))


def test_a_transposed_matrix_does_not_fit_the_embeddings(weights, tmp_path):
    tensors = {**stored("transposed", weights), "wte.weight": torch.randn(50, D)}
    folder = write(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"but the width of wte\.weight is 20"):
        kq.read(folder, heads=HEADS, **names("linear"))
    assert kq.read(folder, heads=HEADS, layout="transposed", **names("linear"))[0].form.dim == D


def test_heads_are_those_of_the_config(weights, tmp_path):
    folder = write(tmp_path, stored("linear", weights), num_attention_heads=HEADS)
    with pytest.raises(ValueError, match="heads is 2, but the config's num_attention_heads says 4"):
        kq.read(folder, heads=2, **names("linear"))


def test_the_width_of_a_head_is_that_of_the_config(weights, tmp_path):
    folder = write(tmp_path, stored("linear", weights), num_attention_heads=HEADS, head_dim=6)
    with pytest.raises(ValueError, match="has 12 rows for 4 heads, but the config's head_dim is 6"):
        kq.read(folder, **names("linear"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "sideways"}, "layout must be one of"),
        ({"query": "a.{layer}", "layout": "linear"}, "query and key patterns go together"),
        ({"key": "a.{layer}"}, "query and key patterns go together"),
        ({"query": "a.{layer}", "key": "b.{layer}", "layout": "fused"}, "is of one tensor, but key names another"),
    ],
)
def test_options_that_do_not_go_together_are_named(options, words, weights, tmp_path):
    folder = write(tmp_path, stored("linear", weights))
    options = {**names("linear"), **options} if "query" not in options and "key" not in options else options
    with pytest.raises(ValueError, match=words):
        kq.read(folder, heads=HEADS, **options)


def test_a_layout_alone_says_nothing(tmp_path, weights):
    with pytest.raises(ValueError, match="layout needs query and key"):
        kq.read(write(tmp_path, stored("linear", weights)), layout="heads")


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
