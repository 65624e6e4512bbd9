"""What heads wrote is known where their output is projected, and nowhere else."""

import torch
from torch import nn

import keyquery as kq
from tests.listening.models import CausalSelfAttention, Stack


def sources(projection):
    """What attention after an MLP, which comes after attention, reads."""
    torch.manual_seed(0)
    first, mlp = CausalSelfAttention(24, 4), nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24))
    first.c_proj = projection
    model = Stack([first, mlp, CausalSelfAttention(24, 4)]).eval()
    return set(kq.attribute(model, inputs=[{"ids": torch.randint(31, (4, 9))}], head="1.0", query=3).sources)


def test_heads_are_told_apart_by_their_projection_and_no_mlp_is_taken_for_one():
    heads = {f"0.{head}" for head in range(4)}
    assert {"token embedding", *heads} < sources(nn.Linear(24, 24))
    whole = sources(nn.Identity())
    assert "attention 0" in whole
    assert not heads & whole
