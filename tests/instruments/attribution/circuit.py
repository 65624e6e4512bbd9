"""A hand-built two-layer attention-only induction circuit, of whose paths exactly one is not zero."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
WORDS, LENGTH = 8, 12
SHARP = 60.0
IDS = torch.tensor([[3, 1, 4, 6, 5, 2, 3, 1, 4, 6, 5, 2]])
WIDTH = 2 * (WORDS + LENGTH + WORDS)
# Subspaces: the token, its position, and the token before it. Every direction e has a twin −e, so that all vectors have
# mean 0 and LayerNorm only scales.
TOKEN, PLACE, BEFORE = (slice(a, b) for a, b in ((0, 8), (8, 20), (20, 28)))


def _twins(matrix):
    return torch.cat((matrix, -matrix), -1)


def built():
    """The model."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=1, n_inner=4, attn_implementation="eager"
    )
    model, half = transformers.GPT2Model(config).eval(), WIDTH // 2
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "ln_" in name and "weight" in name else 0.0)
        model.wte.weight.copy_(_twins(torch.eye(WORDS, half)))
        places = torch.zeros(LENGTH, half)
        places[:, PLACE] = torch.eye(LENGTH)
        model.wpe.weight.copy_(_twins(places))
        first, second = (block.attn.c_attn.weight for block in model.h)
        rows = torch.arange(half)[PLACE]
        first[rows, rows] = SHARP  # the query of position i is e_i
        first[rows[:-1], WIDTH + rows[1:]] = SHARP  # the key of position i is e_(i + 1)
        token = torch.arange(half)[TOKEN]
        first[token, 2 * WIDTH + token] = 1.0  # values are tokens
        before = torch.arange(half)[BEFORE]
        model.h[0].attn.c_proj.weight[token, before] = 1.0  # written as the token before
        model.h[0].attn.c_proj.weight[token, half + before] = -1.0
        second[token, token] = SHARP  # the query is the token
        second[before, WIDTH + token] = SHARP  # the key is the token before
    return model


def repeated_halves():
    """Twelve sequences, each of which repeats six different tokens."""
    torch.manual_seed(0)
    halves = [torch.randperm(WORDS)[:6] for _ in range(12)]
    return torch.stack([torch.cat((half, half)) for half in halves])
