"""The repr of a Form and of its results."""

import torch

import keyquery as kq


def test_repr_shows_the_headline():
    form = kq.Form(torch.eye(2).expand(3, 2, 2), torch.eye(2).expand(3, 2, 2))
    assert repr(form) == "Form(batch=(3,), r=2, d=2, float32, symmetry 1.00, effective rank 2.0)"
    assert "<th>symmetry</th><td>1.00</td>" in form._repr_html_()
    meta = kq.Form(torch.eye(2, device="meta"), torch.eye(2, device="meta"))
    assert repr(meta).endswith("on meta)")
    assert meta.symmetric.rank == 4


def test_results_show_themselves_in_one_line():
    form = kq.Form(*torch.randn(2, 12, 12, 8, 64))
    covariance, mean = torch.eye(64), torch.ones(64)
    one, solution = form[0, 0], kq.ksvd(*torch.randn(2, 30, 4), rank=2)
    results = [form, form.svd(), form.eigh(), form.skew_planes(), form.signature(), form.shares(covariance, mean)]
    for result in [*results, kq.Rope(128, frequencies=torch.rand(64)), solution, solution.primal()]:
        assert len(repr(result)) < 160
        assert "\n" not in repr(result)
    assert repr(form.svd(2)).startswith("Svd(left=float64[12, 12, 64, 2], values=float64[12, 12, 2], right=")
    assert repr(one.signature()) == "Signature(positive=8, negative=8, zero=48)"
