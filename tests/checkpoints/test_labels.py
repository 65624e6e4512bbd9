"""Layers of several stacks have labels, one numbering for all commands; and a layer gives one head by its number."""

import pytest
import torch
from rich.console import Console

import keyquery as kq
from keyquery.pages import terminal

pytest.importorskip("transformers", reason="tiny models need the extra hf")

from keyquery.instruments.ablation.ablate import Ablation
from keyquery.proof.families import tiny_model

STACKS = ["encoder 0", "encoder 1", "decoder 0", "decoder 1", "cross 0", "cross 1"]
LABELS = {
    "t5": STACKS,
    "bart": STACKS,
    "whisper": STACKS,
    "deepseek": ["0 nope", "0 rope", "1 nope", "1 rope"],
    "siglip": ["text 0", "text 1", "vision 0", "vision 1", "cross"],
    "bert": ["0", "1"],
    "llama": ["0", "1"],
}


def printed(reading):
    console = Console(width=100)
    with console.capture() as captured:
        terminal.show(reading, console)
    return captured.get()


@pytest.mark.parametrize("name", LABELS)
def test_labels(name):
    heads = kq.read(tiny_model(name))
    assert heads.labels() == [layer.label for layer in heads] == LABELS[name]
    assert heads.model.get("labels") == (None if name in ("bert", "llama") else LABELS[name])


def test_a_table_names_stacks():
    reading = kq.look(tiny_model("t5"))
    assert "4.1 cross 0" in printed(reading)
    assert "2.0 decoder 0" in printed(kq.compare(reading, kq.look(tiny_model("t5"))))
    assert '"labels": ["encoder 0"' in reading.to_json()


def test_an_ablation_names_stacks_and_both_kernels_of_a_latent_head():
    row = {"layer": 1, "head": 3, "part": "skew", "change": 1.0, "low": 0.0, "high": 2.0}
    for name, label in (("t5", "1.3 encoder 1"), ("deepseek", "1.3 0 nope+rope"), ("bert", "1.3 ")):
        facts = kq.read(tiny_model(name)).model
        assert label in printed(Ablation(model=facts, loss=1.0, sequences=2, by="head", rows=[row]))


def test_a_dial_takes_the_numbers_and_labels_that_a_look_shows():
    model = tiny_model("t5")
    ids = {"input_ids": torch.randint(3, 60, (1, 6)), "decoder_input_ids": torch.randint(3, 60, (1, 6))}
    with torch.no_grad():
        with kq.dial(model, skew=0, heads="2.1"):
            by_number = model(**ids)[0]
        with kq.dial(model, skew=0, heads="decoder 0.1"):
            by_label = model(**ids)[0]
        plain = model(**ids)[0]
    assert torch.equal(by_number, by_label)
    assert not torch.equal(by_number, plain)
    with pytest.raises(ValueError, match=r"there is no self-attention layer 4 \(cross 0\), requested by '4\.\*'"):
        kq.dial(model, heads="4.*")


@pytest.mark.parametrize("view", ["raw", "biased", "folded"])
def test_one_head_of_grouped_queries(view):
    model = tiny_model("llama", num_attention_heads=8, num_key_value_heads=2, attention_bias=True)
    layer = kq.read(model)[1]
    form = {"raw": layer.form, "biased": layer.biased, "folded": layer.folded}[view]
    for head in range(8):
        assert torch.equal(layer.head(head, view).dense(), form.dense().flatten(0, 1)[head])
    query, key = model.layers[1].self_attn.q_proj.weight, model.layers[1].self_attn.k_proj.weight
    expected = query.view(8, 4, 32)[6].mT @ key.view(2, 4, 32)[1]
    torch.testing.assert_close(layer.head(6).dense(), expected.detach())


def test_a_head_that_is_not_there_is_named():
    layer = kq.read(torch.nn.MultiheadAttention(8, 2))[0]
    with pytest.raises(ValueError, match="index must be"):
        layer.head(2)
    with pytest.raises(ValueError, match="view must be one of"):
        layer.head(0, "cooked")
