"""Forms whose geometry is known in closed form."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyquery as kq
from tests.forms.strategies import forms


@pytest.mark.parametrize(("dim", "rank", "sd"), [(32, 8, 0.046), (128, 64, 0.0099)])
def test_random_factors_have_mean_symmetry_one_over_d(dim, rank, sd):
    symmetry = kq.Form(*torch.randn(2, 200, rank, dim)).symmetry
    assert abs(symmetry.mean() - 1 / dim) < 3 * sd / math.sqrt(len(symmetry))
    assert symmetry.std() == pytest.approx(sd, rel=0.25)


def dense_form(matrix):
    return kq.Form(torch.eye(len(matrix), dtype=matrix.dtype), matrix)


@given(angle=st.floats(0, math.pi), dim=st.integers(2, 10), seed=st.integers(0, 1000))
def test_planted_parts_have_symmetry_cos_2t(angle, dim, seed):
    matrix = torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    symmetric, skew = matrix + matrix.mT, matrix - matrix.mT
    planted = math.cos(angle) * symmetric / symmetric.norm() + math.sin(angle) * skew / skew.norm()
    assert float(dense_form(planted).symmetry) == pytest.approx(math.cos(2 * angle), abs=1e-12)


@pytest.mark.parametrize(("rank", "dim"), [(2, 9), (5, 9), (12, 9), (64, 768)])
def test_tied_factors_are_symmetric_and_psd(rank, dim):
    query = torch.randn(rank, dim, dtype=torch.float64)
    form = kq.Form(query, query.clone())
    assert float(form.symmetry) == 1
    assert float(form.skew_values().max()) <= 1e-12
    assert float(form.symmetric_eigenvalues().min()) >= -1e-12 * float(form.symmetric_eigenvalues().max())
    assert float(form.positive_share) == pytest.approx(1, abs=1e-12)
    assert tuple(map(int, form.signature())) == (min(rank, dim), 0, dim - min(rank, dim))
    assert not form.skew.dense().any()


def test_nearly_tied_factors_keep_the_digits_of_their_difference():
    """A plain Gram matrix of [Q; K] gives skew values of 2e-8·‖M‖ here; they are 1e-11·‖M‖."""
    query, difference = torch.randn(2, 4, 60, dtype=torch.float64)
    key = query + 1e-11 * difference
    exact = key - query  # what is left of the difference after rounding
    skew = (query.mT @ exact - exact.mT @ query) / 2
    form = kq.Form(query, key)
    torch.testing.assert_close(form.skew_values(), torch.linalg.svdvals(skew)[:8], rtol=1e-9, atol=0)


def test_a_full_rank_untied_head_has_signature_r_r():
    assert tuple(map(int, kq.Form(*torch.randn(2, 5, 40)).signature())) == (5, 5, 30)


@given(form=forms(kinds=("random", "tied", "near-tied 1e-3", "fading rows")))
def test_orthogonal_change_of_basis_changes_no_number(form):
    basis = torch.linalg.qr(torch.randn(form.dim, form.dim, dtype=torch.float64)).Q
    turned = form.change_basis(basis)
    for name in ("symmetric_eigenvalues", "skew_values", "singular_values", "effective_rank", "stable_rank"):
        torch.testing.assert_close(getattr(turned, name)(), getattr(form, name)(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(turned.symmetry, form.symmetry, rtol=0, atol=1e-10)


def test_a_gain_does_change_symmetry():
    form = kq.Form(*torch.randn(2, 4, 30))
    assert abs(form.change_basis(torch.diag(torch.rand(30) + 0.1)).symmetry - form.symmetry) > 1e-3


@pytest.mark.parametrize("shape", [(2, 7), (9, 7), (3, 2, 7)])
def test_a_zero_form_has_no_nan(shape):
    form = kq.Form(torch.zeros(shape), torch.randn(shape))
    batch = torch.zeros(shape[:-2], dtype=torch.float64)
    for number in (form.symmetry, form.norm2, form.trace(), form.effective_rank(), form.stable_rank()):
        assert torch.equal(number, batch)
    assert torch.equal(form.column_directionality(), batch)
    assert torch.equal(form.positive_share, batch)
    positive, negative, zero = form.signature()
    assert not positive.any()
    assert not negative.any()
    assert bool((zero == 7).all())
    assert not form.symmetric_eigenvalues().any()
    covariance, mean = torch.eye(7), torch.ones(7)
    assert all(not share.any() for share in form.shares(covariance, mean))


def test_a_form_minus_itself_is_zero():
    form = kq.Form(*torch.randn(2, 3, 4, 30, dtype=torch.float64))
    nothing = form - form
    assert torch.equal(nothing.symmetry, torch.zeros(3, dtype=torch.float64))
    assert torch.equal(nothing.effective_rank(), torch.zeros(3, dtype=torch.float64))
    assert torch.equal(nothing.column_directionality(), torch.zeros(3, dtype=torch.float64))
    assert not torch.stack(nothing.shares(torch.eye(30), torch.ones(30))).any()
    assert nothing.norm2.sqrt().max() <= 1e-14 * form.norm2.sqrt().max()


def test_equal_row_norms_do_not_stand_out():
    turn = torch.linalg.qr(torch.randn(50, 50, dtype=torch.float64)).Q
    assert float(dense_form(turn).column_directionality()) == 0


def test_columns_that_stand_out_make_directionality_negative():
    matrix = torch.ones(30, 30, dtype=torch.float64)
    matrix[:, 3] = 50
    assert float(dense_form(matrix).column_directionality()) == -1
    assert float(dense_form(matrix.mT).column_directionality()) == 1
    assert float(dense_form(matrix).column_directionality(kind="norms")) == -1


def test_a_weight_changed_in_place_is_measured_again():
    query, key = torch.randn(2, 3, 20)
    form = kq.Form(query, key)
    before = form.norm2
    query.mul_(2)
    torch.testing.assert_close(form.norm2, 4 * before)


def test_a_returned_spectrum_may_be_changed():
    form = kq.Form(*torch.randn(2, 3, 20))
    before = form.symmetric_eigenvalues().clone()
    form.symmetric_eigenvalues().zero_()
    assert torch.equal(form.symmetric_eigenvalues(), before)


def test_works_under_inference_mode():
    query, key = torch.randn(2, 3, 20)
    expected = kq.Form(query, key).symmetry
    with torch.inference_mode():
        assert torch.equal(kq.Form(query.clone(), key.clone()).symmetry, expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda form: pickle.loads(pickle.dumps(form))])
def test_a_copy_does_not_keep_old_numbers(copied):
    query, key = torch.randn(2, 3, 20)
    query.mul_(1), key.mul_(1)
    form = kq.Form(query, key)
    before = form.norm2
    other = copied(form)
    other.query.mul_(3)
    torch.testing.assert_close(other.norm2, 9 * before)


def test_a_list_of_forms_has_a_sum():
    form = kq.Form(*torch.randn(2, 3, 20))
    torch.testing.assert_close(sum([form, form]).norm2, 4 * form.norm2)
    assert bool(form)


def test_a_zero_head_does_not_change_its_neighbours():
    query, key = torch.randn(2, 4, 3, 20, dtype=torch.float64)
    query[2] = 0
    form = kq.Form(query, key)
    assert float(form.norm2[2]) == 0
    torch.testing.assert_close(
        form.symmetric_eigenvalues()[[0, 1, 3]], kq.Form(query[[0, 1, 3]], key[[0, 1, 3]]).symmetric_eigenvalues()
    )


def test_numbers_on_data_are_not_rounded_to_the_dtype_of_the_factors():
    query, key = (torch.randn(2, 4, 20).to(torch.bfloat16)).unbind()
    covariance = torch.cov(torch.randn(20, 60, dtype=torch.float64))
    short, long = kq.Form(query, key).on(covariance), kq.Form(query.double(), key.double()).on(covariance)
    for name in ("trace", "row_norms", "column_directionality", "symmetric_eigenvalues"):
        torch.testing.assert_close(getattr(short, name)(), getattr(long, name)(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(short.svd().values, short.singular_values())
    torch.testing.assert_close(short.eigh().values, short.symmetric_eigenvalues())


def test_on_few_tokens_the_form_is_that_of_the_tokens():
    """Xᶜ M Xᶜᵀ/n has the spectra of Σ^½MΣ^½, and needs neither a covariance nor its root."""
    form = kq.Form(*torch.randn(2, 8, 64, dtype=torch.float64))
    x = torch.randn(10, 64, dtype=torch.float64)
    centred = x - x.mean(0)
    small = form.change_basis(centred.mT) / 10
    on, count = form.on(centred.mT @ centred / 10), 10
    top = small.singular_values()[0]
    for name in ("symmetric_eigenvalues", "skew_values"):
        given, expected = getattr(on, name)(), getattr(small, name)()
        kept = given.abs().argsort(descending=True)[:count].sort().values
        assert (given[kept] - expected).abs().max() <= 1e-10 * top
        rest = given.abs().sort(descending=True).values[count:]
        assert rest.max() <= 1e-10 * top


def test_the_threshold_of_directionality_is_two_standard_deviations():
    form = kq.Form(*torch.randn(2, 3, 60, dtype=torch.float64))
    assert torch.equal(form.column_directionality(), form.column_directionality(gamma=2.0))
    assert not torch.equal(form.column_directionality(), form.column_directionality(gamma=1.0))


def test_nearest_psd_of_a_tied_form_has_its_rank():
    query = torch.randn(4, 30, dtype=torch.float64)
    assert kq.Form(query, query.clone()).nearest("psd").rank == 4


def test_forms_of_a_batch_can_be_taken_one_by_one():
    form = kq.Form(*torch.randn(2, 4, 3, 9, dtype=torch.float64))
    assert len(form) == 4
    for one, dense in zip(form, form.dense(), strict=True):
        torch.testing.assert_close(one.dense(), dense)
    assert form[1:3].batch == (2,)
    torch.testing.assert_close(form[torch.tensor([2, 0])].dense(), form.dense()[[2, 0]])


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
    one = form[0, 0]
    phi = torch.randn(30, 4)
    results = [form, form.svd(), form.eigh(), form.skew_planes(), form.signature(), form.shares(covariance, mean)]
    results += [one.svd(), one.signature(), kq.Rope(128, frequencies=torch.rand(64)), kq.ksvd(phi, phi, rank=2)]
    results += [kq.ksvd(phi, phi, rank=2).primal()]
    for result in results:
        assert len(repr(result)) < 160
        assert "\n" not in repr(result)
    assert (
        repr(form.svd(2)) == "Svd(left=float64[12, 12, 64, 2], values=float64[12, 12, 2], right=float64[12, 12, 64, 2])"
    )
    assert repr(one.signature()) == "Signature(positive=8, negative=8, zero=48)"
    assert repr(kq.Rope(4)) == "Rope(dims=4, base=10000.0, interleaved=False, frequencies=None, factor=1.0)"


def test_what_is_shared_stays_shared_when_forms_are_taken_out():
    query, key = torch.randn(3, 4, 2, 9, dtype=torch.float64), torch.randn(3, 1, 2, 9, dtype=torch.float64)
    grouped, one_key = kq.Form(query, key), kq.Form(query, key[0, 0])
    assert grouped[1:].key.shape == (2, 1, 2, 9)
    assert grouped[0].key.shape == (1, 2, 9)
    torch.testing.assert_close(grouped[1:].dense(), grouped.dense()[1:])
    torch.testing.assert_close(grouped[-1].dense(), grouped.dense()[-1])
    torch.testing.assert_close(one_key[1:].dense(), one_key.dense()[1:])
    across = kq.Form(torch.randn(1, 4, 2, 9), torch.randn(3, 4, 2, 9))
    torch.testing.assert_close(across[2].dense(), across.dense()[2])
    torch.testing.assert_close(across[:2].dense(), across.dense()[:2])
