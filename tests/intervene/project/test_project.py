"""Projections of single heads: exact, of the rank asked for, nearest, and undone."""

import pytest
import torch

import keyquery as kq
from keyquery.intervene.project.project import components
from keyquery.proof.families import tiny_model

ROPES = {
    "none": None,
    "whole": kq.Rope(8),
    "interleaved": kq.Rope(8, interleaved=True),
    "partial": kq.Rope(4, factor=1.2),
}


def layer_of(rope, **options):
    return kq.Attention(16, 2, rope=rope, head_dim=8, bias=False, **options).double().eval().requires_grad_(False)


def rewritten(layer, x, **options):
    """Scores of head 1 before and after a projection, as the layer itself uses them."""
    seen = []
    query, key, _ = layer._rotated(x, None, 0)
    before = query @ key.mT
    listener = kq.listen(layer, lambda call: seen.append(call.query @ call.keys().mT))
    with kq.project(layer, head=(0, 1), **options) as projection, listener:
        layer(x)
    assert (seen[0][0, 0] - before[0, 0]).abs().max() < 1e-12, "the other head stays"
    return before[0, 1], seen[0][0, 1], projection


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_symmetric_and_skew_are_exact(rope):
    layer, x = layer_of(rope), torch.randn(1, 7, 16, dtype=torch.float64)
    before, alike, _ = rewritten(layer, x, kernel="symmetric")
    assert (alike - (before + before.mT) / 2).abs().max() < 1e-12
    before, points, _ = rewritten(layer, x, kernel="skew")
    assert (points - (before - before.mT) / 2).abs().max() < 1e-12
    _, nothing, projection = rewritten(layer, x, kernel="zero")
    assert nothing.abs().max() == 0
    assert projection.lost == 1


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_psd_is_positive_and_a_psd_head_stays_as_it_is(rope):
    layer, x = layer_of(rope), torch.randn(1, 9, 16, dtype=torch.float64)
    _, scores, projection = rewritten(layer, x, kernel="psd")
    assert torch.linalg.eigvalsh(scores).min() > -1e-10
    assert (scores - scores.mT).abs().max() < 1e-10
    assert 0 < projection.lost < 1
    tied = layer_of(rope, kernel="psd")
    before, same, projection = rewritten(tied, x, kernel="psd")
    assert (before - same).abs().max() < 1e-10
    assert abs(projection.lost) < 1e-10


@pytest.mark.parametrize("kernel", ["general", "symmetric", "psd", "skew"])
def test_ranks_are_those_of_the_dense_matrix(kernel):
    """Eckart and Young: the truncation of the dense part is the nearest, and what is lost is known."""
    layer = layer_of(None)
    form = layer.form()[1]
    dense = form.dense().detach()
    part = {"general": dense, "symmetric": (dense + dense.mT) / 2, "skew": (dense - dense.mT) / 2}.get(kernel)
    if part is None:
        values, vectors = torch.linalg.eigh((dense + dense.mT) / 2)
        part = vectors * values.clamp(min=0) @ vectors.mT
    left, sizes, right = torch.linalg.svd(part)
    near = left[:, :4] * sizes[:4] @ right[:4]
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    _, scores, projection = rewritten(layer, x, kernel=kernel, rank=4)
    assert (scores - x[0] @ near @ x[0].mT).abs().max() < 1e-10
    assert projection.lost == pytest.approx(float((dense - near).square().sum() / dense.square().sum()))
    assert torch.linalg.matrix_rank(scores, rtol=1e-9) <= 4


@pytest.mark.parametrize("rope", [ROPES["whole"], ROPES["interleaved"], ROPES["partial"]])
def test_what_is_lost_under_rotation_is_the_mean_over_rotations(rope):
    """Over many random places, the scores that are missing have the share of the variance that was told."""
    layer = layer_of(rope)
    form = layer.form()[1]
    kept = components("general", form.gram(), rope)[:2]
    assert sum(component.share for component in components("general", form.gram(), rope)) == pytest.approx(1)
    query, key = (torch.cat([getattr(component, side) for component in kept]) for side in ("query", "key"))
    x = torch.randn(2, 400, 16, dtype=torch.float64)
    q, k = x @ form.query.mT, x @ form.key.mT
    positions = torch.rand(2, 400, dtype=torch.float64) * 1e6
    q, k = rope.rotate(q, positions), rope.rotate(k, positions)
    both = torch.cat((q, k), -1)
    whole, part = (q[0] @ k[1].mT), (both[0] @ query.mT) @ (both[1] @ key.mT).mT
    lost = float((whole - part).square().mean() / whole.square().mean())
    assert lost == pytest.approx(1 - sum(component.share for component in kept), abs=0.02)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_more_rank_loses_less_and_all_of_it_nothing(rope):
    layer = layer_of(rope)
    lost = []
    for rank in (2, 4, 6, 8):
        with kq.project(layer, head=(0, 0), kernel="general", rank=rank) as projection:
            lost.append(projection.lost)
    assert lost == sorted(lost, reverse=True)
    assert abs(lost[-1]) < 1e-10


def test_bad_input_is_told():
    layer, model = layer_of(None), tiny_model("deepseek")
    for options, said in (
        ({"head": (0, 7)}, "layer 0 has no head 7"),
        ({"head": (0, 0), "kernel": "round"}, "kernel"),
        ({"head": (0, 0), "kernel": "general"}, "needs a rank"),
        ({"head": (0, 0), "rank": 0}, "rank"),
        ({"head": (0, 0), "kernel": "skew", "rank": 3}, "rank must be even here"),
    ):
        with pytest.raises(ValueError, match=said):
            kq.project(layer, **options)
    with kq.project(layer, (0, 1)), pytest.raises(ValueError, match=r"head 0\.1 is already changed"):
        kq.project(layer, (0, 1))
    with pytest.raises(ValueError, match="rank must be even"):
        kq.project(layer_of(kq.Rope(8)), head=(0, 0), rank=3)
    with pytest.raises(ValueError, match=r"head must select one head, got '0\.\*', which selects 2"):
        kq.project(layer, "0.*")
    with pytest.raises(ValueError, match="is an MLA layer, whose heads have two QK forms: they cannot be projected"):
        kq.project(model, head=(1, 0), kernel="skew")
