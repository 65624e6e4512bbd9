"""A small reading of every kind that has a page, and the same with markup in its texts."""

from functools import cache

import numpy as np
import torch

import keyquery as kq
from keyquery.instruments.ablation.ablate import Ablation
from keyquery.instruments.lineage.index import Relatives
from keyquery.survey.reading import Survey, answer
from tests.pages.readings import EVIL, monitored, roles, tiny

TOKENS = ["one", "two", "three", "four"]
# Texts that a reading takes for names of its own, not for something to show.
OWN = {"kind", "schema", "units", "mark_i", "mark_j", "method", "verdict", "unit", "graphs", "label", "labels", "test"}
OWN |= {"role", "roles", "side", "modalities", "directed", "of", "source", "sources", "picture", "tiers", "attention"}
OWN |= {"model_type", "evidence", "marks", "data", "thumbnails", "required", "forbidden", "edges"}


def causes():
    attention = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0.3, 0.3, 0.4, 0], [0, 0, 0, 1.0]])
    return kq.causes(attention.expand(2, 4, 4), tokens=TOKENS)


def discovery():
    a, b = np.random.default_rng(0).normal(size=(2, 300))
    data = np.stack([a, b, a + b + 0.5 * np.random.default_rng(1).normal(size=300)], 1)
    return kq.discover(data, names=["rain", "sprinkler", "wet"], bootstrap=4)


def flow():
    attention = (2 * torch.randn(3, 2, 10, 10, generator=torch.Generator().manual_seed(0))).double().softmax(-1)
    return kq.flow(attention, ["image"] * 6 + ["text"] * 4, keep=3, tokens=[f"w{i}" for i in range(10)])


def reranking():
    generator = torch.Generator().manual_seed(0)
    model = kq.KReciprocalReranker(top=20, neighbours=8, device="cpu")
    names = [f"item {i}" for i in range(30)]
    queries, database = torch.randn(2, 6, generator=generator), torch.randn(30, 6, generator=generator)
    return model.moves(queries, database, most=7, names=names, relevant=[[1, 2, 3], []])


def surveyed(name, symmetry, run=None, step=None, family="llama", parameters=1_000_000, attention="causal"):
    """A row of a survey."""
    figures = {"symmetry": symmetry, "symmetry_folded": -symmetry, "symmetry_together": symmetry / 2}
    figures |= {"symmetry_low": symmetry - 0.1, "symmetry_high": symmetry + 0.1}
    figures |= {"column_directionality": 0.0, "rank_used": 0.5}
    facts = {"name": name, "file": f"f {name}", "run": run, "step": step, "family": family, "model_type": family}
    facts |= {"parameters": parameters, "layers": 2, "heads": 4, "width": 8, "attention": attention, "source": "/none"}
    layers = {"by_layer": [symmetry, symmetry / 3], "together_by_layer": [0.0, symmetry], "notes": []}
    return {**facts, **figures, **layers, "labels": {"mixed": 4}}


def survey():
    models = [surveyed(f"run/step{step}", step / 2000, "run", step) for step in (1000, 0, 200)]
    models += [surveyed("big", -0.3, parameters=8_000_000_000, family="gpt2")]
    models += [surveyed("enc", 0.6, attention="bidirectional")]
    return Survey(models=models, broken=[{"name": "broken", "source": "x", "why": "no config"}], **answer(models))


def decoder():
    torch.manual_seed(0)
    return kq.Decoder(16, depth=2, heads=2).eval(), torch.randn(4, 9, 16)


def ablation():
    rows = [
        {"layer": layer, "head": head, "part": part, "change": change, "low": change - 0.02, "high": change + 0.02}
        for layer in (0, 1)
        for head in (0, 1, 2)
        for part, change in (("symmetric", 0.01 * layer), ("skew", 0.05 * head), ("zero", 0.1))
    ]
    return Ablation(model={"name": "costly", "layers": 2}, loss=3.0, sequences=32, by="head", rows=rows)


def relatives():
    row = {"model": "near", "related": True, "p": 1e-9, "basis_free": 20.0, "shared_basis": None}
    other = {"model": "far", "related": False, "p": 0.5, "basis_free": 0.1, "shared_basis": 0.3}
    return Relatives(model="mine", searched=5, comparable=2, rows=[row, other])


READINGS = {
    "ablation": ablation,
    "attribution": lambda: kq.attribute(decoder()[0], inputs={"x": decoder()[1][:1]}, head="1.0", query=6, key=2),
    "causes": causes,
    "comparison": lambda: kq.compare(tiny("bert")[2], tiny("bert")[2]),
    "discovery": discovery,
    "flow": flow,
    "lineage": lambda: kq.lineage(decoder()[0], decoder()[0]),
    "lineage search": relatives,
    "look": lambda: tiny("bert")[2],
    "monitor": monitored,
    "reranking": reranking,
    "roles": roles,
    "survey": survey,
    "transport": lambda: kq.transport(torch.rand(3, 8, 2), labels=["a", "b"] * 4),
    "wiring": lambda: kq.wiring(decoder()[0], inputs=[{"x": decoder()[1]}]),
}


@cache
def reading(kind):
    """The reading of a kind, made once."""
    return READINGS[kind]()


def spoiled(value, by=EVIL):
    """Plain data with markup behind every text; keys stay."""
    if isinstance(value, dict):
        return {name: item if name in OWN else spoiled(item, by) for name, item in value.items()}
    if isinstance(value, list):
        return [spoiled(item, by) for item in value]
    return value + by if isinstance(value, str) else value
