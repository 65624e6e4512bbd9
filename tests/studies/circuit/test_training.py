"""The batched models against the model of each seed, and the data against its promises."""

import torch
from keyquery_studies.circuit.training import (
    AttentionOnly,
    Plan,
    Size,
    clip,
    initial,
    loss,
    model_of,
    passages,
    train,
)

from keyquery.instruments.ablation.losses import next_token_loss

SMALL = Size(vocabulary=30, width=16, depth=2, heads=2)


def test_all_seeds_at_once_are_each_model_alone():
    weights = initial(SMALL, 3)
    ids = torch.randint(30, (3, 4, 9), generator=torch.Generator().manual_seed(0))
    losses = loss(weights, SMALL, ids)
    for seed in range(3):
        model = model_of(weights, SMALL, seed)
        assert isinstance(model, AttentionOnly)
        assert torch.allclose(next_token_loss(model, {"input_ids": ids[seed]}).mean().float(), losses[seed], atol=1e-5)
    assert not torch.equal(weights["unembed.weight"][0], weights["unembed.weight"][1])


def test_gradients_are_clipped_seed_by_seed():
    weight = torch.zeros(2, 3, requires_grad=True)
    weight.grad = torch.tensor([[3.0, 4.0, 0.0], [0.3, 0.4, 0.0]])
    clip({"w": weight}, 1.0)
    assert torch.allclose(weight.grad.norm(dim=1), torch.tensor([1.0, 0.5]))


def test_passages_repeat_at_more_than_one_distance():
    ids = passages(Size(vocabulary=1000), Plan(length=60), 40, torch.Generator().manual_seed(0))
    distances = []
    for row in ids:
        followers = {}
        for at in range(59):
            pair = (int(row[at]), int(row[at + 1]))
            if pair in followers:
                distances.append(at - followers[pair])
            followers[pair] = at
    counts = torch.tensor(distances).bincount()
    assert min(distances) >= 6
    assert counts.max() < 0.25 * counts.sum()  # no distance is right more often than this


def test_training_lowers_the_loss_and_keeps_the_steps():
    plan = Plan(seeds=2, batch=4, length=16, kept=(0, 5, 30), warmup=5, rate=0.01)
    kept = list(train(Size(vocabulary=16, width=16, depth=2, heads=2), plan))
    assert [step for step, _, _ in kept] == [0, 5, 30]
    assert (kept[2][2] < kept[1][2]).all()
