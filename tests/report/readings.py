"""Readings for the tests of the page: of tiny real models, and of many heads with random figures."""

import numpy as np
import torch

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.reading import Look

EVIL = '</script><script>window.hurt = 1</script><img src=x onerror="window.hurt = 1">'


class Evil:
    """A tokenizer whose tokens are markup."""

    def decode(self, ids):
        return EVIL if ids[0] % 2 else f" word{ids[0]}"


RAW = {"symmetry": 0.1, "column_directionality": 0.2, "column_directionality_norms": 0.3}


def tiny(family, sample=8, **options):
    """A tiny model of a family, one batch, and the look at it."""
    from keyquery.proof.families import tiny_model

    model = tiny_model(family)
    ids = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    ids[0, :3] = torch.tensor([4, 5, 6])
    options = {"name": f"tiny {family}", "tokenizer": Evil(), "directions": 2, **options}
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return model, batch, kq.look(model, inputs=[batch], length=9, sample=sample, **options)


def crowd(layers, heads, rank, tokens, rotary):
    """A look of many heads, with every kind of figure that a page shows."""
    rng = np.random.default_rng(0)
    plain = (
        "column_directionality",
        "column_directionality_norms",
        "symmetric_energy",
        "positive_share",
        "effective_rank",
    )

    def figures():
        spectra = {"eigenvalues": 2 * rank, "skew_values": 2 * rank, "singular_values": rank}
        drawn = {name: np.sort(rng.normal(size=size))[::-1].tolist() for name, size in spectra.items()}
        offsets = {"offset": list(range(8)), "contents": rng.random(8).tolist(), "exchange": rng.random(8).tolist()}
        return {
            **{name: float(rng.normal()) for name in (*plain, "skew_energy", "stable_rank")},
            "symmetry": float(rng.uniform(-1, 1)),
            **drawn,
            **({"offsets": offsets} if rotary else {}),
        }

    def on_data():
        shares = {"symmetry": 0.5, **dict(zip(PARTS, rng.dirichlet([1] * 5).tolist(), strict=True)), "interaction": 0.0}
        shares |= {"sink": 0.01, "effective_rank_symmetric": 3.0, "effective_rank_skew": 4.0}
        return {
            **shares,
            "intervals": {name: [value - 0.1234567, value + 0.1234567] for name, value in shares.items()},
            "half_window": {name: shares[name] for name in (*PARTS, "interaction", "symmetry")},
            "interactions": {f"{a} × {b}": 0.01234 for a in PARTS for b in PARTS if a < b},
            "changes_with_window": ["symmetry"],
        }

    def head(layer, number):
        said = [f"token{i}" for i in range(5)]
        return {
            "layer": layer,
            "head": number,
            "name": f"layers.{layer}.self_attn.{number}",
            "kind": "self",
            "scale": rank**-0.5,
            "rank": rank,
            "raw": figures(),
            "folded": {key: value for key, value in figures().items() if key != "offsets"},
            "on_data": on_data(),
            "label": "mixed",
            "reason": "needs position and skew (0.104 nats); all else could go for 0.001",
            "evidence": "estimated",
            "properties": ["psd", "low rank 7"],
            "objects": [{"value": float(rng.normal()), "tokens": said, "opposite": said}] * 4,
            "relations": [{"value": float(rng.normal()), "pairs": [said[:2]] * 5}] * 4,
            "scores": {part: rng.normal(size=(tokens, tokens)).tolist() for part in PARTS},
        }

    rows = [
        {"layer": i, "name": f"layers.{i}.self_attn", "kind": "self", "causal": rotary, "raw": RAW}
        for i in range(layers)
    ]
    return Look(
        model={"name": "many heads", "layers": layers, "width": heads * rank, "family": "llama"},
        layers=rows,
        heads=[head(layer, number) for layer in range(layers) for number in range(heads)],
        sample={"tokens": [f"token{i}" for i in range(tokens)]},
        provenance={"data": {"tokens": 20000, "sequences": 156, "length": 128, "longest": 128, "from": "text.txt"}},
    )
