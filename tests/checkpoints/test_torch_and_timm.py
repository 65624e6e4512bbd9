"""Layouts that have no transformers model: torch's own attention, and timm's block restated."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import keyquery as kq


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"vdim": 6}])
def test_scores_are_those_of_multihead_attention(options):
    attention = nn.MultiheadAttention(12, 3, batch_first=True, **options)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_()
    x, value = torch.randn(1, 5, 12), torch.randn(1, 5, options.get("vdim", 12))
    _, expected = attention(x, x, value, average_attn_weights=False)
    (layer,) = kq.read(attention)
    form = layer.biased
    tokens = nn.functional.pad(x[0], (0, form.dim - 12), value=1.0)
    torch.testing.assert_close((form.scores(tokens) * layer.scale).softmax(-1), expected[0])
    query, key = layer.project(x[0])
    torch.testing.assert_close((query @ key.mT * layer.scale).softmax(-1).squeeze(1), expected[0])


class TimmAttention(nn.Module):
    """timm's vision attention, restated: one qkv, split as (3, heads, r), query and key norms of each head."""

    def __init__(self, dim, heads, normed):
        super().__init__()
        self.heads, self.rank = heads, dim // heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm = nn.LayerNorm(self.rank, eps=1e-6) if normed else nn.Identity()
        self.k_norm = nn.LayerNorm(self.rank, eps=1e-6) if normed else nn.Identity()

    def forward(self, x):
        batch, n, dim = x.shape
        query, key, value = self.qkv(x).reshape(batch, n, 3, self.heads, self.rank).permute(2, 0, 3, 1, 4).unbind(0)
        self.scores = self.q_norm(query) * self.rank**-0.5 @ self.k_norm(key).mT
        return self.proj((self.scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, n, dim))


class TimmBlock(nn.Module):
    def __init__(self, dim, heads, normed):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), TimmAttention(dim, heads, normed)

    def forward(self, x):
        return x + self.attn(self.norm1(x))


class TimmModel(nn.Module):
    def __init__(self, normed):
        super().__init__()
        self.blocks = nn.Sequential(*(TimmBlock(16, 4, normed) for _ in range(2)))

    def forward(self, x):
        return self.blocks(x)


@pytest.mark.parametrize("normed", [False, True])
def test_timm_blocks(normed):
    model = TimmModel(normed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and "weight" in name else 0.0, 0.3)
    x = torch.randn(1, 5, 16)
    heads = kq.read(model, heads=4)
    assert heads.family.name == "timm"
    with torch.no_grad():
        for layer, block in zip(heads, model.blocks, strict=True):
            entered = block.norm1(x)
            out = block(x)
            query, key = layer.project(entered[0])
            torch.testing.assert_close((query @ key.mT * layer.scale).squeeze(1), block.attn.scores[0])
            if not normed:
                before = (entered[0] - block.norm1.bias) / block.norm1.weight
                tokens = nn.functional.pad(before, (0, 1), value=1.0)
                both = layer.folded.scores(tokens) * layer.scale, block.attn.scores[0]
                seen = [scores - scores.mean(-1, keepdim=True) for scores in both]  # softmax sees no more
                torch.testing.assert_close(*seen)
            x = out


def owner(model, norm):
    """The norm of a model that has the gains of one that was read."""
    for name, value in model.named_parameters():
        if norm is not None and torch.equal(value.float(), norm.gain.float()):
            return name.removesuffix(".weight")
    return None


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    ("first", "encoder", "decoder", "cross"),
    [
        (True, ["layers.0.norm1", "layers.1.norm1"], "layers.1.norm1", "layers.1.norm2"),
        (False, [None, "layers.0.norm2"], "layers.0.norm3", "layers.1.norm1"),
    ],
)
def test_the_norms_that_feed_torchs_own_layers_are_read(first, encoder, decoder, cross, tmp_path):
    model = nn.Transformer(12, 3, 2, 2, 24, norm_first=first, layer_norm_eps=1e-3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    heads = {layer.name: layer for layer in kq.read(model)}
    assert [owner(model.encoder, heads[f"encoder.layers.{index}.self_attn"].norm) for index in (0, 1)] == encoder
    assert owner(model.decoder, heads["decoder.layers.1.self_attn"].norm) == decoder
    assert owner(model.decoder, heads["decoder.layers.1.multihead_attn"].norm) == cross
    assert owner(model, heads["decoder.layers.1.multihead_attn"].memory_norm) == "encoder.norm"
    assert heads["encoder.layers.1.self_attn"].norm is None or heads["encoder.layers.1.self_attn"].norm.eps == 1e-3
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    layers = [layer for layer in kq.read(tmp_path, heads=3) if layer.kind == "self"]
    # A file does not say which norms feed its layers.
    assert all(layer.norm is None and "the norm that feeds it is not read" in layer.notes[0] for layer in layers)


class Towers(nn.Module):
    """The attention of an open_clip model: two towers of torch's attention, of other widths and numbers of heads."""

    def __init__(self):
        super().__init__()
        self.visual, self.transformer = nn.Module(), self.blocks(16, 4)
        self.visual.transformer = self.blocks(24, 3)

    def blocks(self, width, heads):
        stack = nn.Module()
        stack.resblocks = nn.ModuleList(nn.Module() for _ in range(2))
        for block in stack.resblocks:
            block.attn, block.ln_1 = nn.MultiheadAttention(width, heads, batch_first=True), nn.LayerNorm(width)
        return stack


def test_towers_of_open_clip_have_their_own_numbers_of_heads(tmp_path):
    model = Towers()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="attention of widths 16, 24, which one number of heads does not fit"):
        kq.read(tmp_path, heads=4)
    sizes = {"vision_cfg": {"width": 24, "head_width": 8}, "text_cfg": {"width": 16, "heads": 4}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": sizes}))
    heads = kq.read(tmp_path)
    assert [(layer.heads, layer.causal) for layer in heads] == [(3, False), (3, False), (4, True), (4, True)]
    for layer in heads:
        block = model.get_submodule(layer.name.rpartition(".")[0])
        x = block.ln_1(torch.randn(1, 5, block.ln_1.weight.shape[0]))
        query, key = layer.project(x[0])
        expected = block.attn(x, x, x, average_attn_weights=False)[1][0]
        torch.testing.assert_close((query @ key.mT * layer.scale).softmax(-1).squeeze(1), expected)
        assert torch.equal(layer.norm.gain, block.ln_1.weight)
