"""The norm that feeds a layer is compared with the running model's."""

import dataclasses

import pytest

pytest.importorskip("transformers", reason="proofs need the extra hf")

from keyquery.checkpoints import heads
from keyquery.proof.proof import prove


def planted(change):
    """What reads norms, with the norm that feeds a layer changed."""
    read = heads.read_norms

    def changed(*arguments):
        norms = read(*arguments)
        return {**{role: norm for role, norm in norms.items() if role != "norm"}, **change(norms["norm"])}

    return changed


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda norm: {}, "input_layernorm that makes its tokens is not read"),
        (lambda norm: {"norm": dataclasses.replace(norm, kind="layer")}, "its norm differs by "),
        (lambda norm: {"norm": dataclasses.replace(norm, gain=norm.gain * 1.001)}, "its norm differs by 0.001"),
    ],
)
def test_a_wrong_norm_is_found(change, why, monkeypatch):
    assert prove("llama").status == "exact"
    monkeypatch.setattr(heads, "read_norms", planted(change))
    proof = prove("llama")
    assert (proof.status, why in proof.reason) == ("wrong", True), str(proof)


def test_a_norm_is_read_where_none_is(monkeypatch):
    read = heads.read_norms
    monkeypatch.setattr(heads, "read_norms", lambda *a: {**read(*a), "norm": read(*a)["query_norm"]})
    assert "its norm" in prove("olmo2").reason


def test_a_factor_on_what_a_norm_returns_is_read():
    proof = prove({"model_type": "falcon_h1", "attention_in_multiplier": 2.1})
    assert proof.status == "exact", str(proof)
