"""A hand-built model whose heads have known roles, and explicit sums over its maps."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, PLACES, HEADS = 48, 48, 4
WIDTH = 4 * 100  # a head has 100 dimensions: enough for tokens and places side by side
SHARP = 60.0  # score of a match: attention is one-hot to float precision
TOKEN, PLACE, BEFORE = (slice(start, start + 48) for start in (0, 48, 96))  # blocks of the residual stream


def built() -> GPT2LMHeadModel:
    """Two layers without MLPs. 0.0 previous-token, 0.1 uniform, 0.2 duplicate-token, 0.3 sink; 1.0 induction.

    Tokens and places are one-hot. 0.0 writes the token before into its own block, where 1.0 looks for the query's
    token and copies what it finds to the output: the induction circuit of Olsson et al. (2022).
    """
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=PLACES, n_embd=WIDTH, n_layer=2, n_head=HEADS, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    eye = torch.eye(48)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight[:, TOKEN], model.transformer.wpe.weight[:, PLACE] = eye, eye
        for norm in [block.ln_1 for block in model.transformer.h] + [model.transformer.ln_f]:
            norm.weight.fill_(1.0)
        first, second = (block.attn for block in model.transformer.h)
        unit = _unit(2)  # size of a one after the norm: two ones per token in layer 0
        _connect(first, 0, PLACE, PLACE, key=eye.roll(1, 1), size=SHARP / unit**2)  # key j answers to query j + 1
        _write(first, 0, TOKEN, BEFORE, 1 / unit)
        _connect(first, 2, TOKEN, TOKEN, size=SHARP / unit**2)
        _connect(first, 2, PLACE, PLACE, key=-eye, size=SHARP / unit**2, at=48)  # never the query itself
        start = torch.zeros(48, 48)
        start[0] = 1.0  # the key of place 0 answers to every query
        _connect(first, 3, PLACE, PLACE, key=start, size=SHARP / unit**2)
        unit = _unit(3)
        _connect(second, 0, TOKEN, BEFORE, size=SHARP / unit**2)
        _write(second, 0, TOKEN, TOKEN, 4 / unit)
    return model


def _unit(ones: int) -> float:
    """The difference between a one and a zero after LayerNorm, of a vector with so many ones."""
    mean = ones / WIDTH
    return (mean - mean**2) ** -0.5


def _connect(attention, head, query_block, key_block, key=None, size=1.0, at=0):
    """Query and key weights of a head: the identity, or `key`, between two blocks; `size` times √r, which divides."""
    start, r = head * 100 + at, 100
    columns = slice(start, start + 48)
    attention.c_attn.weight[query_block, columns] = torch.eye(48) * size * r**0.5
    attention.c_attn.weight[key_block, WIDTH + start : WIDTH + start + 48] = torch.eye(48) if key is None else key


def _write(attention, head, source, target, size):
    """Values of a head: one block is copied into another."""
    start = head * 100
    attention.c_attn.weight[source, 2 * WIDTH + start : 2 * WIDTH + start + 48] = torch.eye(48) * size
    attention.c_proj.weight[start : start + 48, target] = torch.eye(48)


def by_hand(role, maps, ids, seen, window=8):
    """Score and null level of one map (n, n) by explicit loops; None if no query counts."""
    n = len(maps)

    def keys(i):
        tests = {
            "previous_token": lambda j: j == i - 1,
            "next_token": lambda j: j == i + 1,
            "local": lambda j: abs(i - j) < window,
            "sink": lambda j: j == 0,
            "duplicate_token": lambda j: j != i and ids[j] == ids[i],
            "induction": lambda j: j != i and j > 0 and j - 1 != i and ids[j - 1] == ids[i],
        }
        return {j for j in range(n) if seen[i][j] and tests[role](j)}

    queries = [i for i in range(n) if 0 < len(keys(i)) < sum(seen[i])]
    if not queries:
        return None
    anyones = set().union(*(keys(i) for i in range(n)))
    score = sum(maps[i][j] for i in queries for j in keys(i)) / len(queries)
    uniform = sum(len(keys(i)) / sum(seen[i]) for i in queries) / len(queries)
    if role in ("previous_token", "next_token", "local", "sink"):
        return score, uniform
    permuted = 0.0
    for i in queries:
        others = [j for j in anyones - keys(i) if seen[i][j]]
        permuted += len(keys(i)) * sum(maps[i][j] for j in others) / max(len(others), 1) / len(queries)
    return score, max(uniform, permuted)
