"""Groups of vectors that lie along curves: neighbours are of one group, but a group's ends are far from each other."""

import math

import torch
from torch.nn.functional import normalize

MEMBERS = DIM = 24


def curves(groups, seed):
    """Points Σ_{j ≤ 2} a_j cos jt + b_j sin jt with noise, t on 24 points of [0, π], in R²⁴; and their groups."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, math.pi, MEMBERS)
    waves = torch.stack([wave(j * t) for j in (1, 2) for wave in (torch.cos, torch.sin)], 1)
    points = waves @ torch.randn(groups, 4, DIM, generator=generator)
    points = points + 0.15 * math.sqrt(2) * torch.randn(points.shape, generator=generator)
    return normalize(points.flatten(0, 1), dim=1), torch.arange(groups).repeat_interleave(MEMBERS)


def others(vectors, top=None):
    """Every item's list of all others, nearest first."""
    scores = vectors @ vectors.T
    scores.fill_diagonal_(-2)
    return scores.argsort(dim=1, descending=True, stable=True)[:, : top or len(vectors) - 1]


def mean_precision(lists, labels):
    """mAP by its definition, of lists of all others."""
    hits = (labels[lists] == labels.unsqueeze(1)).double()
    precision = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1)
    return float(((precision * hits).sum(1) / hits.sum(1)).mean())
