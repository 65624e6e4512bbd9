"""The folded view leaves out what softmax does not see: what a key's constant adds to all scores of a query."""

import torch
from torch import nn

import keyquery as kq
from keyquery.proof.families import tiny_model


def test_a_constant_of_all_keys_is_in_no_folded_figure():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2)
    nn.init.normal_(layer.in_proj_bias)
    before = kq.read(layer)[0].folded
    with torch.no_grad():
        layer.in_proj_bias[16:32] += 100.0  # b_q·b_k dwarfs all else, and every key has it
    after = kq.read(layer)[0].folded
    assert torch.equal(after.symmetry, before.symmetry)
    x, y = torch.randn(2, 5, 17, dtype=torch.float64)
    x[:, -1] = y[:, -1] = 1
    assert torch.allclose(after.scores(x, y), before.scores(x, y))


def test_what_rotates_differs_from_key_to_key_and_stays():
    model = tiny_model("qwen2")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("k_proj.bias"):
                weight.normal_()
    layer = kq.read(model)[0]
    assert float(layer.folded.key[..., -1].abs().max()) > 0
