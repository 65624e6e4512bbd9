"""What positions add to scores, layouts of tables, and keys of other tokens: against brute force and closed forms."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import keyquery as kq
from keyquery.checkpoints.layer import Norm
from keyquery.checkpoints.positions.relative import Relative


def write(folder, tensors, **config):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return kq.read(folder)


def attention(prefix, width, *roles):
    return {
        f"{prefix}{role}.{part}": torch.randn(width, width)[0 if part == "bias" else slice(None)].clone()
        for role in roles
        for part in ("weight", "bias")
    }


def test_tables_of_windows(tmp_path):
    """BEiT: bias by differences of rows and columns, and three of its own for the class token."""
    prefix, side, heads = "encoder.layer.0.attention.attention.", 3, 2
    table = torch.randn((2 * side - 1) ** 2 + 3, heads)
    name = f"{prefix}relative_position_bias.relative_position_bias_table"
    found = write(
        tmp_path,
        {**attention(prefix, 8, "query", "key", "value"), name: table},
        model_type="beit",
        num_attention_heads=2,
    )
    at = torch.arange(side**2 + 1)
    bias = found.pair_bias(found[0], at, at)
    assert bias.shape == (heads, 10, 10)
    for i in range(1, 10):
        for j in range(1, 10):
            down, right = (i - 1) // side - (j - 1) // side, (i - 1) % side - (j - 1) % side
            assert torch.equal(bias[:, i, j].float(), table[(down + 2) * 5 + right + 2])
    assert torch.equal(bias[:, 0, 4].float(), table[-3])
    assert torch.equal(bias[:, 4, 0].float(), table[-2])
    assert torch.equal(bias[:, 0, 0].float(), table[-1])


@pytest.mark.parametrize("side", ["query", "key"])
def test_vectors_of_positions_by_brute_force(side):
    vectors, content = torch.randn(2, 5, 3), torch.randn(2, 4 if side == "query" else 6, 3)
    index, bias = torch.randint(0, 5, (4, 6)), torch.randn(2, 3)
    scores = Relative(side, vectors, index, 0.5, bias).scores(content)
    for head in range(2):
        for i in range(4):
            for j in range(6):
                own = content[head, i if side == "query" else j] + bias[head]
                expected = 0.5 * own @ vectors[head, index[i, j]]
                torch.testing.assert_close(scores[head, i, j], expected)


def test_keys_of_another_width(tmp_path):
    """A Q-Former's cross-attention: the form acts on the sum of both spaces, and only between them."""
    prefix = "encoder.layer.0.crossattention.attention."
    query, key = torch.randn(8, 8), torch.randn(8, 6)
    tensors = {f"{prefix}query.weight": query, f"{prefix}key.weight": key}
    layer = write(tmp_path, tensors, model_type="blip_2_qformer", num_attention_heads=2)[0]
    assert any("different widths" in note for note in layer.notes)
    x, y = torch.randn(5, 8), torch.randn(7, 6)
    found = torch.einsum("hsnr,htmr->hnm", *layer.project(x, y))
    for head in range(2):
        rows = slice(4 * head, 4 * head + 4)
        matrix = query[rows].T @ key[rows]
        torch.testing.assert_close(found[head], x @ matrix @ y.T)
        torch.testing.assert_close(layer.form[head].dense()[:8, 8:], matrix)
        assert float(layer.form[head].norm2) == pytest.approx(float(matrix.square().sum()), rel=1e-5)
        assert abs(float(layer.form[head].symmetry)) < 1e-6
    gain, shift = torch.rand(6) + 0.5, torch.randn(6)
    normed = replace(layer, memory_norm=Norm("layer", gain, shift), norm=Norm("rms", torch.rand(8) + 0.5))
    folded = normed.folded[0]
    scores = torch.nn.functional.pad(normed.norm.gain * x, (0, 6)), torch.nn.functional.pad(gain * y, (8, 0))
    width = folded.dim - 14  # one dimension for the bias, if any
    a, b = (
        torch.nn.functional.pad(torch.nn.functional.pad(t, side), (0, width), value=1.0)
        for t, side in ((x, (0, 6)), (y, (8, 0)))
    )
    torch.testing.assert_close(
        folded.scores(a[:, None], b[None]), layer.form[0].scores(scores[0][:, None], scores[1][None])
    )


def test_layers_with_keys_of_earlier_layers(tmp_path):
    """Gemma 3n: a file may hold key weights that the model does not use."""
    tensors = {}
    for layer in range(3):
        for role in ("q", "k", "v", "o"):
            tensors[f"layers.{layer}.self_attn.{role}_proj.weight"] = torch.randn(8, 8)
        for role in ("q", "k"):
            tensors[f"layers.{layer}.self_attn.{role}_norm.weight"] = torch.ones(4)
        tensors[f"layers.{layer}.input_layernorm.weight"] = torch.rand(8)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    facts = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "num_kv_shared_layers": 1}
    heads = write(tmp_path, tensors, model_type="gemma3n_text", layer_types=kinds, sliding_window=4, **facts)
    assert [layer.kind for layer in heads] == ["self", "self", "cross"]
    assert torch.equal(heads[2].weights.key, heads[0].weights.key)
    assert torch.equal(heads[2].memory_norm.gain, tensors["layers.0.input_layernorm.weight"])
    assert "its keys are those of layers.0.self_attn" in heads[2].notes


def test_tabpfn_v2_has_attention_between_features_and_between_rows(tmp_path):
    names = [
        f"transformer_encoder.layers.{n}.self_attn_between_{part}" for part in ("features", "items") for n in (0, 1)
    ]
    tensors = {f"{name}._w_qkv": torch.randn(3, 2, 4, 8) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    heads = kq.read(tmp_path)
    assert [layer.name for layer in heads] == names
    x = torch.randn(5, 8)
    query, key, _ = tensors[f"{names[2]}._w_qkv"]
    expected = torch.einsum("nd,hrd,hre,me->hnm", x, query, key, x)
    torch.testing.assert_close(torch.einsum("hsnr,htmr->hnm", *heads[2].project(x)), expected)
    assert heads[2].notes == ("rows to be predicted see the keys of head 0 in all heads",)
    save_file({f"{name}._w_qkv": torch.randn(2, 2, 4, 8) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected \(3, heads, r, d\)"):
        kq.read(tmp_path)[0]


def test_tabicl_keeps_its_frequencies_in_its_file(tmp_path):
    places = [
        "tf_col.blocks.0.multihead_attn1",
        "tf_col.blocks.0.multihead_attn2",
        "tf_row.blocks.0",
        "tf_icl.blocks.0",
    ]
    tensors = {f"{place}.attn.in_proj_weight": torch.randn(24, 8) for place in places}
    tensors |= {f"{place}.attn.out_proj.weight": torch.randn(8, 8) for place in places}
    tensors |= {f"{place}.norm1.weight": torch.ones(8) for place in places[2:]}
    tensors["tf_row.rope.freqs"] = torch.tensor([1.0, 0.3])
    tensors["tf_icl.blocks.0.attn.ssmax_layer.base_mlp.0.weight"] = torch.ones(4, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    heads = kq.read(tmp_path, heads=2)
    assert [layer.kind for layer in heads] == ["cross", "cross", "self", "self"]
    assert torch.equal(heads[2].rope.frequencies, tensors["tf_row.rope.freqs"])
    assert heads[2].rope.interleaved
    assert "SSMax" in heads[3].notes[0]
    assert heads[2].notes == ()
