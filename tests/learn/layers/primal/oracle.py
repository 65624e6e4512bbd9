"""A primal layer by brute force: every pair of tokens written out, in float64, with plain autograd."""

import torch
from torch.nn.functional import elu, normalize

import keyquery as kq


def make(dim=12, heads=2, rank=3, seed=0, **options):
    """A layer with no special values in it."""
    torch.manual_seed(seed)
    layer = kq.PrimalAttention(dim, heads, rank, **options).double()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return layer


def phi(layer, z):
    return normalize(z, dim=-1) if layer.features == "cosine" else elu(z) + 1


def parts(layer, x):
    """φ(q), φ(k) and f's own slices of one sequence (n, dim): (heads, n, ·)."""
    both = layer.query_key(x).unflatten(-1, (2, layer.heads, -1))
    query, key = (phi(layer, both[:, side]).transpose(0, 1) for side in (0, 1))
    return query, key, x.unflatten(-1, (layer.heads, -1)).transpose(0, 1)


def merge(layer, e, r):
    heads = torch.cat((e, r), -1) @ layer.concat.weight.mT + layer.concat.bias
    return layer.output(heads.transpose(0, 1).flatten(1))


def scores(layer, x):
    """e and r (heads, n, s) of one sequence, and which tokens are in f(X)."""
    query, key, own = parts(layer, x)
    if not layer.data_dependent:
        return query @ layer.we, key @ layer.wr, []
    n, most = len(x), layer.we.shape[1]
    count = min(n, most)
    places = [int(j * (n - 1) / max(count - 1, 1)) for j in range(count)]
    seen = own[:, places]  # every pair of a token and a sampled one
    return query @ seen.mT @ layer.we[:, :count], key @ seen.mT @ layer.wr[:, :count], places


def forward(layer, x):
    """The output of one sequence."""
    e, r, _ = scores(layer, x)
    return merge(layer, e, r)


def causal(layer, x):
    """The causal output of one sequence."""
    query, key, own = parts(layer, x)
    rows = [j % layer.we.shape[1] for j in range(len(x))]
    roots = torch.arange(1, len(x) + 1, dtype=x.dtype).sqrt()[:, None]
    pairs = torch.stack((query @ own.mT, key @ own.mT)).tril() / roots
    return merge(layer, pairs[0] @ layer.we[:, rows], pairs[1] @ layer.wr[:, rows])


def objective(layer, x):
    """J of every head of one sequence."""
    e, r, places = scores(layer, x)
    rows = len(places) if layer.data_dependent else layer.we.shape[1]
    scale = layer.log_lambda.exp()[:, None]
    energy = ((e.square() + r.square()) * scale).sum(-1).mean(-1) / 2
    return energy - (layer.we[:, :rows] * layer.wr[:, :rows]).sum((1, 2))


def kernel(layer, x):
    """K (heads, n, n) of one sequence, and its features f(X)φ."""
    query, key, own = parts(layer, x)
    if layer.data_dependent:
        _, _, places = scores(layer, x)
        query, key = query @ own[:, places].mT, key @ own[:, places].mT
    return query @ key.mT, query, key


def overlap(layer, x):
    """The share of K's leading left subspace that e spans, head by head, of one sequence."""
    e, _, _ = scores(layer, x)
    left = torch.linalg.svd(kernel(layer, x)[0])[0][..., : layer.rank]
    return (left.mT @ torch.linalg.qr(e)[0]).square().sum((1, 2)) / layer.rank
