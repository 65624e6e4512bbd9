"""Readings for the tests of pages: of tiny real models, and of many heads with random figures; and a page's data."""

import base64
import io
import json
import re

import numpy as np
import torch
from rich.console import Console

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.reading import Look
from keyquery.instruments.monitor.reading import Monitored
from keyquery.instruments.roles.patterns import ROLES
from keyquery.instruments.roles.roles import Roles
from keyquery.pages import terminal

EVIL = '</script><script>window.hurt = 1</script><img src=x onerror="window.hurt = 1">'


class Evil:
    """A tokenizer whose tokens are markup."""

    def decode(self, ids):
        return EVIL if ids[0] % 2 else f" word{ids[0]}"


def tiny(family, sample=8, rows=3, length=9, **options):
    """A tiny model of a family, one batch, and the look at it."""
    from keyquery.proof.families import tiny_model

    model = tiny_model(family)
    ids = torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(1))
    ids[0, :3] = torch.tensor([4, 5, 6])
    options = {"name": f"tiny {family}", "tokenizer": Evil(), "directions": 2, **options}
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch |= {"decoder_input_ids": ids} if family == "t5" else {}
    return model, batch, kq.look(model, inputs=[batch], length=length, sample=sample, **options)


def crowd(layers, heads, rank, tokens, rotary):
    """A look of many heads, with every kind of figure that a page shows."""
    rng = np.random.default_rng(0)
    words = [f"token{i}" for i in range(max(tokens, 5))]
    plain = ("column_directionality", "symmetric_energy", "skew_energy", "positive_share", "effective_rank")

    def weights():
        spectra = {"eigenvalues": 2 * rank, "skew_values": 2 * rank, "singular_values": rank}
        drawn = {name: np.sort(rng.normal(size=size))[::-1].tolist() for name, size in spectra.items()}
        numbers = {name: float(rng.normal()) for name in (*plain, "column_directionality_norms", "stable_rank")}
        return {**numbers, **drawn, "symmetry": float(rng.uniform(-1, 1))}

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
        curves = {"offset": list(range(8)), "contents": rng.random(8).tolist(), "exchange": rng.random(8).tolist()}
        return {
            **{"layer": layer, "head": number, "name": f"layers.{layer}.self_attn.{number}", "kind": "self"},
            **{"scale": rank**-0.5, "rank": rank, "label": "mixed", "evidence": "estimated"},
            "raw": {**weights(), **({"offsets": curves} if rotary else {})},
            "folded": weights(),
            "on_data": on_data(),
            "reason": "needs position and skew (0.104 nats); all else could go for 0.001",
            "properties": ["psd", "low rank 7"],
            "objects": [{"value": float(rng.normal()), "tokens": words[:5], "opposite": words[:5]}] * 4,
            "relations": [{"value": float(rng.normal()), "pairs": [words[:2]] * 5}] * 4,
            "scores": {part: rng.normal(size=(tokens, tokens)).tolist() for part in PARTS},
        }

    raw = {"symmetry": 0.1, "column_directionality": 0.2, "column_directionality_norms": 0.3}
    return Look(
        model={"name": "many heads", "layers": layers, "width": heads * rank, "family": "llama"},
        layers=[
            {"layer": i, "name": f"layers.{i}.self_attn", "kind": "self", "causal": rotary, "raw": raw}
            for i in range(layers)
        ],
        heads=[head(layer, number) for layer in range(layers) for number in range(heads)],
        sample={"tokens": words[:tokens]},
        provenance={"data": {"tokens": 20000, "sequences": 156, "length": 128, "longest": 128, "from": "text.txt"}},
    )


def shown(reading, width=100):
    """What a terminal of this width shows of a reading."""
    out = io.StringIO()
    terminal.show(reading, Console(file=out, width=width))
    return out.getvalue()


def data_of(html):
    """The JSON of a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def unpacked(text):
    """The codes of `pack`, as their definition says."""
    values = []
    for code in np.frombuffer(base64.b64decode(text), "<u2").tolist():
        sign, size = (-1 if code >> 15 else 1), (code & 32767) - 1
        values.append(
            None if code == 65535 else 0.0 if size < 0 else sign * float(f"{100 + size % 900}e{size // 900 - 20}")
        )
    return values


def measure_of(data, key, tab=0):
    """A measure of a page's frame."""
    return next(one for one in data["tabs"][tab]["frame"]["measures"] if one["key"] == key)


def block_of(data, kind, tab=0):
    """The first block of a kind."""
    return next(block for block in data["tabs"][tab]["blocks"] if block["type"] == kind)


def scored(score, null=0.05, clears=True):
    return {"score": score, "low": score - 0.02, "high": score + 0.02, "null": null, "sequences": 32, "clears": clears}


def roles():
    """Roles of 18 heads: every role in turn, and every ninth head without one."""
    rows = []
    for index in range(18):
        role = [*ROLES, None][index % (len(ROLES) + 1)]
        scores = {name: {"random": scored(0.8 if name == role else 0.01 * (1 + index % 6))} for name in ROLES}
        scores["retrieval"] = {"needle": scores["retrieval"]["random"]}
        scores["sink"]["text"] = scored(0.9 if role == "sink" else 0.1)
        place = {"layer": index // 6, "head": index % 6, "name": f"layers.{index // 6}.{index % 6}", "kind": "self"}
        rows.append({**place, "role": role, "roles": [role] if role else [], "scores": scores})
    facts = {"least": 0.3, "error": 0.05, "length": 128, "data": ["random", "needle", "text"]}
    return Roles(model={"name": "every role", "layers": 3}, heads=rows, notes=["a note"], provenance=facts)


def monitored(count=4):
    """Two records of some heads, with an alarm for the fourth."""
    heads = [
        {"layer": index // 2, "head": index % 2, "name": f"model.decoder.blocks.{index // 2}.attention.{index % 2}"}
        for index in range(count)
    ]
    curves = {"largest": [[1.0, 1234567.0 + index] for index in range(count)], "bound": [[None, 2e9]] * count}
    alarm = {"step": 50, "rule": "growth", "heads": [3], "head": 3, "value": 1.0, "reason": "growth: x: too large"}
    return Monitored(model={"name": "a"}, steps=[0, 50], heads=heads, curves=curves, alarms=[alarm])
