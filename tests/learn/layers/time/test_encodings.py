"""Codes of time: their kernel depends on the lag alone, to the millisecond, whatever is learned and however padded."""

import copy
import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

import keyquery as kq
from keyquery.learn.layers.time.timestamps import elapsed, spread

SPECTRA = ("normal", "inverse_cdf", "free")
KINDS = (*SPECTRA, "mercer")


def made(kind, dim=24, **options):
    if kind == "mercer":
        return kq.MercerTime(dim, degree=3, periods=dim // 6, **options).double()
    return kq.BochnerTime(dim, kind, **options).double()


def irregular(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(*shape, generator=generator, dtype=torch.float64)).cumsum(-1)


def gram(code, times, origin=0.0):
    features = code.encode(times, origin=origin)
    return features @ features.mT


def trained(code, steps=200):
    """Pulled towards a kernel of its own, by Adam, frequencies and coefficients alike."""
    optimiser, times = torch.optim.Adam(code.parameters(), 0.02), irregular(4, 10)
    aim = torch.exp(-(times[:, :, None] - times[:, None]).abs())
    code.train()
    for _ in range(steps):
        loss = (gram(code, times) - aim).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return code.eval()


# The kernel


@pytest.mark.parametrize("kind", KINDS)
def test_the_gram_matrix_does_not_move_with_all_times_before_and_after_training(kind):
    code, times = made(kind).eval(), irregular(40)
    before = copy.deepcopy(code)
    for one in (code, trained(code)):
        there = gram(one, times + 123.456)
        assert (there - gram(one, times)).abs().max() <= 1e-9
        assert torch.linalg.eigvalsh(there).min() > -1e-12
        assert (there.diagonal() - 1).abs().max() < 1e-12
        assert (one.kernel(times[:, None] - times) - there).abs().max() < 1e-12
    moved = [(a - b).abs().max() for a, b in zip(before.parameters(), code.parameters(), strict=True)]
    assert max(moved) > 0.05  # it has learned something: the test could have failed
    if kind == "inverse_cdf":
        assert (code.network(torch.linspace(0.001, 0.999, 200).double()).diff() > 0).all()


@torch.no_grad()
def test_normal_frequencies_have_the_closed_form_and_its_error_halves_with_four_times_the_features():
    mean, std, lags = 0.7, 0.3, torch.linspace(0, 10, 101, dtype=torch.float64)
    exact = torch.exp(-(std**2) * lags**2 / 2) * torch.cos(mean * lags)

    def error(features, draws=40):
        found = []
        for _ in range(draws):
            code = kq.BochnerTime(features).double().eval()
            code.mean.fill_(mean)
            code.log_std.fill_(math.log(std))
            found.append((code.kernel(lags) - exact).square().mean().sqrt())
        return torch.stack(found).mean()

    errors = [error(features) for features in (64, 256, 1024, 4096)]
    for coarse, fine in pairwise(errors):
        assert fine / coarse == pytest.approx(0.5, rel=0.3)
    assert errors[-1] < 0.03


def test_mercer_is_its_fourier_sum():
    code = kq.MercerTime(12, degree=3, periods=[2.0, 5.0]).double()
    code.raw.data.normal_()
    weights = code.raw.detach().exp().log1p()  # softplus
    weights = weights / weights.sum()
    lag = torch.tensor(1.234, dtype=torch.float64)
    by_hand = sum(
        float(weights[p, j - 1]) * math.cos(2 * math.pi * j * float(lag) / period)
        for p, period in enumerate((2.0, 5.0))
        for j in (1, 2, 3)
    )
    assert code.kernel(lag).item() == pytest.approx(by_hand, abs=1e-14)


# Exact times


@pytest.mark.parametrize("kind", KINDS)
def test_unix_seconds_keep_their_milliseconds(kind):
    """Against fractions: what float64 seconds hold is subtracted without a loss, also for a float32 module."""
    code = made(kind).float().eval()
    start = 1.7e9
    times = start + torch.tensor([0.0, 0.001, 0.002, 3.5, 86400.001], dtype=torch.float64)
    exact = [float(Fraction(t) - Fraction(start)) for t in times.tolist()]
    assert torch.equal(elapsed(times), torch.tensor(exact, dtype=torch.float64))
    angles = torch.tensor(exact, dtype=torch.float64)[:, None] * code.frequencies()
    truth = torch.stack((angles.cos(), angles.sin()), -1) * code.shares().sqrt()[:, None]
    found = code.encode(times)
    assert found.dtype == torch.float32
    assert (found.double() - truth.flatten(1)).abs().max() < 1e-7
    assert not torch.equal(found[0], found[1])


def test_nanoseconds_since_1970_are_subtracted_as_integers():
    """As float64 they would be rounded to 256 ns."""
    start = 1_700_000_000_000_000_000
    nanoseconds = start + torch.tensor([0, 1, 1_000_001])
    for origin in (None, start, nanoseconds[0]):
        assert elapsed(nanoseconds, origin).tolist() == [0.0, 1.0, 1_000_001.0]
    assert elapsed(nanoseconds[None], nanoseconds[1:2]).tolist() == [[-1.0, 0.0, 1_000_000.0]]
    assert elapsed(torch.tensor([3, 4]), 0.5).tolist() == [2.5, 3.5]


def test_periods_stay_exact_in_short_floats():
    week = 604_800.0
    code = kq.MercerTime(4, degree=1, periods=[week, 365 * 86_400.0])
    for dtype in (torch.bfloat16, torch.float16):
        short = copy.deepcopy(code).to(dtype)
        assert short.encode(torch.zeros(1, 2, dtype=torch.float64)).dtype == dtype
        assert short.periods()[0] == week
    assert code.half().double().periods()[1] == 365 * 86_400.0


# Origins, padding, order


def test_two_calls_compare_only_with_one_origin():
    code, times = made("mercer"), irregular(1, 8)
    whole = code.encode(times, origin=0.25)
    assert torch.equal(code.encode(times[:, 3:], origin=0.25), whole[:, 3:])
    assert not torch.allclose(code.encode(times[:, 3:]), code.encode(times)[:, 3:])
    assert torch.equal(code.encode(times), code.encode(times, origin=times[:, 0]))
    assert torch.equal(code.encode(times, origin=2), code.encode(times, origin=2.0))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_touches_nothing(kind):
    code, times = made(kind).eval(), irregular(3, 7)
    real = torch.ones(3, 7, dtype=torch.bool)
    real[0, :2], real[1, 5:], real[2] = False, False, False
    dirty = times.where(real, torch.nan).requires_grad_()
    found = code.encode(dirty, mask=real)
    assert found[~real].abs().max() == 0
    assert torch.equal(found[0, 2:], code.encode(times[0, 2:]))  # its first real time is the origin
    assert torch.equal(found[1, :5], code.encode(times[1, :5]))
    found.sum().backward()
    assert all(weight.grad.isfinite().all() for weight in code.parameters())
    assert dirty.grad.isfinite().all()


def test_what_is_seen_sets_the_periods():
    times = torch.tensor([[0.0, 10.0, 30.0, 7.0], [100.0, 110.0, 110.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False], [True, True, True, False]])
    assert spread(times, mask) == pytest.approx((20.0, 58.0))  # gaps 10, 20, 10; spans 30 and 10
    for code in (kq.MercerTime(16, 2, np.int64(4)), kq.BochnerTime(16, "free")):
        code.see(times, mask)
        lowest = code.frequencies().min().item()
        assert 2 * math.pi / lowest == pytest.approx(58.0)
    for listed in ([1.0, 7.0], torch.tensor([1.0, 7.0])):  # these stay
        given = kq.MercerTime(8, 2, listed)
        given.see(times, mask)
        assert given.periods().tolist() == [1.0, 7.0]
    for kind in ("normal", "inverse_cdf"):
        code = kq.BochnerTime(4096, kind).eval()
        code.see(times, mask)
        middle = code.frequencies().median().item()
        assert middle == pytest.approx(2 * math.pi / math.sqrt(20 * 58), rel=0.1)


# Sampling


@pytest.mark.parametrize("kind", ["normal", "inverse_cdf"])
def test_frequencies_are_drawn_in_training_and_fixed_at_test_time(kind):
    code, times = made(kind), irregular(5)
    assert not torch.equal(code.encode(times), code.encode(times))
    with code.held():
        assert torch.equal(code.encode(times), code.encode(times))
        assert torch.allclose(code.kernel(times[0] - times[3]), code.encode(times)[0] @ code.encode(times)[3])
    code.eval()
    assert torch.equal(code.encode(times), code.encode(times))
    other = made(kind).eval()
    assert not torch.equal(other.encode(times), code.encode(times))
    other.load_state_dict(code.state_dict())
    assert torch.equal(other.encode(times), code.encode(times))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    code = made(kind, dim=12).eval()
    names = [name for name, _ in code.named_parameters()]

    def run(times, *weights):
        given = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(code, given, (times,), {"origin": 0.5})

    weights = [weight.detach().clone().requires_grad_() for weight in code.parameters()]
    assert torch.autograd.gradcheck(run, (irregular(2, 3).requires_grad_(), *weights))


def test_a_coefficient_that_has_vanished_poisons_no_gradient():
    code = made("mercer", dim=12).float()
    with torch.no_grad():
        code.raw[0, 0] = -1000
    code.encode(irregular(2, 3)).square().sum().backward()
    assert code.raw.grad.isfinite().all()
    assert code.change.grad.isfinite().all()


# Bad input

SECONDS = torch.tensor([0.0, 1.0]).double()


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda code: code(SECONDS.float()), TypeError, "times must be a tensor of float64 or integers, .*128 s apart"),
        (lambda code: code([0.0]), TypeError, "times must be a tensor .*got list"),
        (lambda code: code(SECONDS / 0), ValueError, "finite, got 2 NaN or infinite of 2"),
        (lambda code: code(SECONDS, mask=SECONDS[:1] == 0), ValueError, r"mask must be bool \(2,\), .*\(1,\)"),
        (lambda code: code(SECONDS, mask=SECONDS), ValueError, r"mask must be bool \(2,\), .*got torch.float64"),
        (lambda code: code(SECONDS, "now"), TypeError, "origin must be .*got str"),
        (lambda code: code(SECONDS, torch.zeros(())), TypeError, "origin must be a tensor of float64"),
        (lambda code: code(SECONDS.expand(4, 2), SECONDS), RuntimeError, "size of the tensor"),
        (lambda code: code.see(SECONDS[:1].expand(3, 4)), ValueError, "two different times"),
        (lambda code: code.time_kernel(torch.ones(2, 2)), ValueError, r"lags must be finite numbers \(lags,\)"),
        (lambda code: code.time_kernel(torch.tensor([math.nan])), ValueError, "lags must be finite numbers"),
        (lambda _: kq.MercerTime(64, 5, 8), ValueError, r"dim must be 2·degree·periods = 2·5·8, got 64"),
        (lambda _: kq.MercerTime(2, 1, []), ValueError, r"periods must be a count, or a list of .* 1e-300, got \[\]"),
        (lambda _: kq.MercerTime(2, 1, 1.5), TypeError, "periods must be an integer, got 1.5"),
        (lambda _: kq.MercerTime(2, 1, [-1.0]), ValueError, "periods must be a count, or a list"),
        (lambda _: kq.MercerTime(2, 1, [1e-320]), ValueError, "each at least 1e-300"),
        (lambda _: kq.BochnerTime(7), ValueError, "dim must be even"),
        (lambda _: kq.BochnerTime(8, "gaussian"), ValueError, "spectrum must be one of"),
    ],
)
def test_bad_input_is_told(call, error, words):
    with pytest.raises(error, match=words):
        call(made("mercer"))
