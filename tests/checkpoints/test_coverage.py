"""Layers of hybrid models that have no QK form are counted and named."""

import pytest

import keyquery as kq

pytest.importorskip("transformers", reason="needs the extra hf")


@pytest.mark.parametrize(
    ("model_type", "note"),
    [
        ("jamba", ["2 of 4 layers have no QK form: Mamba"]),
        ("nemotron_h", ["3 of 4 layers have no QK form: 2 MLP, 1 Mamba"]),
        ("qwen3_next", ["2 of 4 layers have no QK form: gated delta net"]),
        ("llama", []),
        ("swin", []),
    ],
)
def test_layers_without_a_form_are_named(model_type, note, tmp_path):
    from keyquery.proof.models import build, tiny_configs
    from keyquery.proof.proof import save

    save(build(next(iter(tiny_configs(model_type)))), str(tmp_path))
    heads = kq.read(tmp_path)
    assert [text for text in heads[0].notes if "no QK form" in text] == note
    assert all(layer.notes[: len(note)] == tuple(note) or note == [] for layer in heads)
