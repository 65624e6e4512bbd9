"""Optimal transport between point clouds of equal size: coupling, W₂ distance, Monge gap.

Every point has mass 1/n and costs are squared distances, so that all values are means, not sums.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keyquery.support.checks import check_count, check_float, check_number
from keyquery.support.extras import optional

# Largest exact problem: 2,000 points take about a second, 5,000 ten seconds and 200 MB; time is cubic.
EXACT = 5000

# Entropic regularisation of Sinkhorn, relative to the mean cost between the centred clouds, and the relative error of
# its marginals at which it stops.
EPSILON = 0.01
STOP = 1e-3
ROUNDS = 1000
UNSETTLED = 0.05  # error of the marginals above which it warns


class Match(NamedTuple):
    """A coupling of two point clouds.

    `partner` (n,) is a permutation if `exact`, else the target that receives most of a point's mass; `target` (n, d) is
    the partner's position, or the barycentric projection if not exact. `cost` is the mean squared distance of the
    coupling and `least` a lower bound: both are W₂² if exact, else they bracket it.
    """

    partner: Int[Tensor, " n"]
    target: Float[Tensor, "n d"]
    cost: Float[Tensor, ""]
    least: Float[Tensor, ""]
    exact: bool


def match(start: Float[Tensor, "n d"], end: Float[Tensor, "n d"], *, exact_limit: int = EXACT) -> Match:
    """The coupling of two clouds of n points each that minimises 1/n Σᵢ ‖startᵢ − end_π(i)‖² over permutations π.

    In float64. If the identity is optimal, π is the identity. More than `exact_limit` points are coupled by Sinkhorn on
    the device of `start`, which splits mass, with a warning. Needs the extra `transport`.
    """
    check_count("exact_limit", exact_limit, least=0)
    start, end = _clouds(start.detach(), end.detach())
    stay = (start - end).square().sum(-1).mean()
    if len(start) <= exact_limit or stay == 0:
        partner, cost = torch.arange(len(start), device=start.device), stay
        if stay > 0:
            assigned = _assign(start, end)
            least = (start - end[assigned]).square().sum(-1).mean()
            partner, cost = (assigned, least) if least < stay * (1 - 1e-12) else (partner, cost)
        return Match(partner, end[partner], cost, cost, True)
    # The text does not depend on the size, so that Python shows the warning once only.
    warnings.warn(f"clouds of more than {exact_limit} points are coupled by Sinkhorn, not exactly", stacklevel=2)
    return _soft(start, end)


def gaussian(start: Float[Tensor, "n d"], end: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """W₂ of the Gaussians with the means and (biased) covariances of two clouds: the Bures distance, float64.

    W₂² = ‖μ₁−μ₂‖² + tr(Σ₁ + Σ₂ − 2(Σ₁^½ Σ₂ Σ₁^½)^½): a lower bound of that of the clouds.
    """
    start, end = _clouds(start, end)
    first, second = (_centred(cloud) / math.sqrt(len(cloud)) for cloud in (start, end))  # Σ = FᵀF already
    if len(start) > start.shape[1]:
        first, second = torch.linalg.qr(first).R, torch.linalg.qr(second).R
    return ((start.mean(0) - end.mean(0)).square().sum() + _shapes(first, second)).sqrt()


def monge_gap(
    start: Float[Tensor, "n d"], end: Float[Tensor, "n d"], epsilon: float | None = None, rounds: int = ROUNDS
) -> Float[Tensor, ""]:
    """Monge gap (Uscidda and Cuturi 2023): a differentiable loss that is small if a map is optimal transport.

        gap = 1/n Σᵢ ‖startᵢ − endᵢ‖² − min over couplings P of { Σᵢⱼ Pᵢⱼ ‖startᵢ − endⱼ‖² + ε (log n − H(P)) }

    H is the entropy. The gap lies between T² − W₂² and T² − W₂² + ε log n, in squared units (the Monge gap of a Reading
    is T − W₂). By the envelope theorem its gradient is that at the fixed optimal P.

    Parameters
    ----------
    start, end
        Points (n, d) before and after the map.
    epsilon
        ε. Default: 1 % of the variance of both clouds.
    rounds
        Sinkhorn iterations at most. Default: 1000.

    Returns
    -------
    Tensor
        A scalar ≥ 0 in float64, with gradients in both clouds.

    Raises
    ------
    ImportError
        Without the extra `transport`.

    See Also
    --------
    kq.transport : optimal transport between the layers of a model.

    Examples
    --------
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> float(kq.monge_gap(x, x + 5)) < 1e-9, round(float(kq.monge_gap(x, x.flip(0))), 2)   # T² − W₂² = 1 − 0
    (True, 1.0)
    """
    start, end = map(_centred, _clouds(start, end))  # what both means add to T² and W₂² is the same
    check_count("rounds", rounds)
    if epsilon is not None:
        check_number("epsilon", epsilon)
        if epsilon <= 0:
            raise ValueError(f"epsilon must be positive, got {epsilon}")
    cost = _costs(start, end)
    epsilon = float(_epsilon(cost) if epsilon is None else epsilon)
    f, g = _sinkhorn(cost.detach(), epsilon, STOP * 1e-4, rounds)
    # The dual at potentials f, g, which sums to Sinkhorn's minimum; its gradient in the costs is the coupling.
    plan = ((f[:, None] + g - cost) / epsilon - 2 * math.log(len(start))).exp()
    least = f.mean() + g.mean() - epsilon * (plan.sum() - 1) - epsilon * math.log(len(start))
    return (start - end).square().sum(-1).mean() - least


def _assign(start: Tensor, end: Tensor) -> Tensor:
    """The exact optimum: the permutation with the largest sum of inner products."""
    from scipy.optimize import linear_sum_assignment

    products = _centred(start) @ _centred(end).mT
    _, partner = linear_sum_assignment(products.cpu().numpy(), maximize=True)
    return torch.from_numpy(partner).long().to(start.device)


def _soft(start: Tensor, end: Tensor) -> Match:
    """Sinkhorn's coupling, rounded so that its marginals are exact, and the bound that its potentials prove."""
    n = len(start)
    between = (start.mean(0) - end.mean(0)).square().sum()
    cost = _costs(_centred(start), _centred(end))
    epsilon = _epsilon(cost)
    f, g = _sinkhorn(cost, epsilon, STOP, ROUNDS)
    plan = ((f[:, None] + g - cost) / epsilon - 2 * math.log(n)).exp_()
    plan *= (1 / n / plan.sum(1, keepdim=True)).clamp(max=1)
    plan *= (1 / n / plan.sum(0)).clamp(max=1)
    rows, columns = 1 / n - plan.sum(1), 1 / n - plan.sum(0)
    if (missing := rows.sum()) > 0:
        plan += rows.clamp(min=0)[:, None] * columns.clamp(min=0) / missing
    # Any f with gⱼ = minᵢ (cᵢⱼ − fᵢ) obeys fᵢ + gⱼ ≤ cᵢⱼ, so that the mean of f and g is at most that of any coupling.
    least = f.mean() + (cost - f[:, None]).amin(0).mean()
    return Match(plan.argmax(1), n * plan @ end, between + (plan * cost).sum(), between + least.clamp(min=0), False)


def _sinkhorn(cost: Tensor, epsilon: float, stop: float, rounds: int) -> tuple[Tensor, Tensor]:
    """Potentials f and g of P = exp((f + g − c)/ε)/n², without regard for gradients.

    ε is lowered by factors of four, each time from the previous potentials: from zeros, 1/ε rounds would be needed.
    """
    n = len(cost)
    mass = torch.full((n,), 1 / n, dtype=cost.dtype, device=cost.device)
    f = torch.zeros_like(mass)
    g = torch.zeros_like(mass)
    now = max(epsilon, EPSILON * float(cost.mean()))
    error = 0.0
    while True:
        _, log = optional("ot.bregman", "optimal transport").sinkhorn_log(
            mass, mass, cost, now, rounds, stop / math.sqrt(n), log=True, warn=False, warmstart=(f / now, g / now)
        )
        f = now * log["log_u"]
        g = now * log["log_v"]
        error = float(log["err"][-1]) * math.sqrt(n)
        if now == epsilon:
            break
        now = max(epsilon, now / 4)
    if error > UNSETTLED:
        warnings.warn(
            f"epsilon = {epsilon:.1e} is small for these clouds: after {rounds} rounds Sinkhorn has not converged; use "
            "a larger epsilon, or more rounds",
            stacklevel=3,
        )
    return f + now * math.log(n), g + now * math.log(n)


def _centred(cloud: Tensor) -> Tensor:
    """The cloud minus its mean: a translation adds the same to the cost of every coupling."""
    return cloud - cloud.mean(0)


def _costs(start: Tensor, end: Tensor) -> Tensor:
    """Squared distances (n, n)."""
    return (start.square().sum(-1, keepdim=True) + end.square().sum(-1) - 2 * start @ end.mT).clamp(min=0)


def _epsilon(cost: Tensor) -> float:
    return EPSILON * float(cost.detach().mean()) or EPSILON


def _shapes(first: Tensor, second: Tensor) -> Tensor:
    """tr(Σ₁ + Σ₂ − 2(Σ₁^½ Σ₂ Σ₁^½)^½) with Σ = FᵀF, as min over orthogonal U of ‖F₁ − U F₂‖².

    This form avoids cancellation if both are similar.
    """
    left, _, right = torch.linalg.svd(first @ second.mT)
    return (first - left @ right @ second).square().sum()


def _clouds(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Two clouds of one shape in float64, on a device that supports it."""
    check_float("start", start, "n d")
    check_float("end", end, "n d", n=start.shape[0], d=start.shape[1])
    start, end = ((cloud.cpu() if cloud.device.type == "mps" else cloud).double() for cloud in (start, end))
    return start, end


def check_installed(points: int) -> None:
    """Raise early if a package that is needed to couple so many points is missing."""
    if points > EXACT:
        optional("ot.bregman", "optimal transport")
