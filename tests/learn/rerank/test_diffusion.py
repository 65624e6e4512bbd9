"""DiffusionReranker against dense solves in float64."""

import pytest
import torch

import keyquery as kq
from tests.learn.rerank.groups import curves


def solution(query, database, neighbours, seeds, alpha):
    """f of the dense equations (1 - alpha S) f = y, in float64."""
    database, query = database.double(), query.double()
    similar = database @ database.T
    linked = torch.zeros(similar.shape, dtype=torch.bool)
    linked.scatter_(1, similar.argsort(dim=1, descending=True)[:, 1 : neighbours + 1], True)
    weights = similar.clamp(min=0) ** 3 * (linked & linked.T)
    root = weights.sum(1).clamp(min=1e-30).rsqrt()
    first = (database @ query).argsort(descending=True)[:seeds]
    y = torch.zeros(len(database), dtype=torch.float64)
    y[first] = (database[first] @ query).clamp(min=0) ** 3
    return torch.linalg.solve(torch.eye(len(database)).double() - alpha * root[:, None] * weights * root, y)


@pytest.mark.parametrize(("neighbours", "seeds", "top"), [(6, 3, 120), (4, 9, 5), (500, 500, 120)])
def test_scores_are_the_solution_of_the_equations(neighbours, seeds, top):
    vectors, _ = curves(5, seed=0)
    sizes = {"neighbours": neighbours, "seeds": seeds}
    model = kq.DiffusionReranker(top, **sizes, alpha=0.9, rounds=200, device="cpu")
    order, scores = model.rerank(vectors[::9], vectors)
    nearest = (vectors[::9] @ vectors.T).argsort(dim=1, descending=True)
    for query, mine, score, candidates in zip(vectors[::9], order, scores, nearest, strict=True):
        if top == 5:  # seeds count beyond the candidates
            assert set(mine.tolist()) == set(candidates[:5].tolist())
        truth = solution(query, vectors, **sizes, alpha=0.9)
        assert torch.allclose(score.double(), truth[mine], atol=1e-4 * float(truth.max()))
        assert (score.diff() <= 0).all()
