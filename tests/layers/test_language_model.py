"""Blocks and the language model around them."""

import pytest
import torch

import keyquery as kq
from keyquery.layers import LanguageModel, Shape


@pytest.mark.parametrize("rope", [False, True])
def test_generating_with_caches_equals_the_full_pass(rope):
    model = LanguageModel(Shape(vocab_size=20, width=16, depth=2, causal=True, rope=rope)).double().eval()
    ids = torch.randint(20, (2, 9))
    caches = [kq.Cache() for _ in range(2)]
    parts = [model(part, caches=caches) for part in ids.split([4, 1, 1, 3], 1)]
    assert torch.allclose(torch.cat(parts, 1), model(ids), atol=1e-12)


def test_padding_on_the_left_does_not_move_the_places():
    model = LanguageModel(Shape(vocab_size=20, width=16, depth=2)).double().eval()
    ids = torch.randint(20, (1, 6))
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), ids), 1)
    mask = torch.tensor([[0] * 3 + [1] * 6])
    assert torch.allclose(model(padded, attention_mask=mask)[:, 3:], model(ids), atol=1e-12)


def test_a_saved_model_comes_back(tmp_path):
    model = LanguageModel(Shape(vocab_size=20, width=16, depth=1, kernel="split")).eval()
    model.save(tmp_path, dtype=torch.float32)
    ids = torch.randint(20, (1, 6))
    assert torch.equal(LanguageModel.load(tmp_path)(ids), model(ids))


def test_a_text_that_is_too_long_is_told():
    with pytest.raises(ValueError, match="positions for 4 tokens, got 5"):
        LanguageModel(Shape(vocab_size=20, width=16, length=4))(torch.zeros(1, 5, dtype=torch.long))


def test_each_block_has_its_own_cache():
    with pytest.raises(ValueError, match="one per block, 2, got 1"):
        kq.Decoder(8, depth=2, heads=2)(torch.zeros(1, 3, 8), caches=[kq.Cache()])


@pytest.mark.parametrize("rope", [False, True])
def test_heads_may_be_wider_than_their_share_and_are_read_so(rope, tmp_path):
    model = LanguageModel(Shape(vocab_size=20, width=16, depth=1, causal=True, rope=rope, head_dim=6))
    model.save(tmp_path, dtype=torch.float32)
    head = kq.read(tmp_path)[0]
    layer = model.body.blocks[0].attention
    assert torch.allclose(head.form.dense(), layer.form().dense())
    assert head.scale == layer.scale == 6**-0.5


def test_an_encoder_of_primal_attention_is_that_attention_in_every_block_or_in_the_last():
    for kernel, kinds in (("primal", "PP"), ("primal+", "AP")):
        model = kq.Encoder(16, depth=2, heads=2, kernel=kernel, primal={"rank": 4, "eta": 0.5}, dropout=0.1)
        assert [type(block.attention).__name__[0] for block in model.blocks] == list(kinds)
        assert model.blocks[-1].attention.eta == 0.5
        assert model.blocks[0].dropout.p == model.blocks[1].dropout.p == 0.1
    mask = torch.arange(7) < torch.tensor([[4], [7]])
    x = torch.randn(2, 7, 16)
    noisy = torch.where(mask[..., None], x, 100.0)
    model.eval()
    torch.testing.assert_close(model(x, mask)[mask], model(noisy, mask)[mask])
    assert kq.regularizer(model).item() > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernel": "primal"}, 'kernels "primal" and "primal\\+" need a rank'),
        ({"kernel": "primal+", "primal": {"eta": 0.1}}, 'kernels "primal" and "primal\\+" need a rank'),
        ({"kernel": "primal+", "primal": {"rnk": 8}}, "an option in primal must be one of .* did you mean 'rank'"),
        (
            {"kernel": "primal-"},
            "kernel must be one of 'general', .*'primal', 'primal\\+', got 'primal-'; did you mean",
        ),
        ({"kernel": "primal", "primal": {"rank": 4}, "kv_heads": 1}, "does not support kv_heads"),
        ({"kernel": "psd", "primal": {"rank": 4}}, "not 'psd'"),
        ({"primal": {"rank": 4}}, "not 'general'"),
    ],
)
def test_options_of_another_kernel_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        kq.Encoder(16, depth=2, heads=2, **options)
