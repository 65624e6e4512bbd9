"""Tools of developers: the search for the TOML of an architecture, and proofs of many types."""

import os
import tomllib
from importlib.metadata import version

import pytest

pytest.importorskip("transformers", reason="proofs need the extra hf")

from keyquery.checkpoints.family import parse
from keyquery.proof import Proof
from tools.architectures import search, written
from tools.architectures import sweep as sweep_module
from tools.architectures.__main__ import main
from tools.architectures.sweep import cached, counts, sweep


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("mistral", {"window": "all", "rope": "half"}),
        pytest.param("nanochat", {"rope": "half", "rope_back": True}, marks=pytest.mark.slow),
        pytest.param("qwen3_vl_vision", {"rope": "half", "axes": ["row", "column"]}, marks=pytest.mark.slow),
    ],
)
def test_the_search_finds_windows_and_rotations(name, facts):
    findings, lost = search.sought(name)
    assert lost == []
    (entry,) = written.family_tables(name, findings)["attention"]
    assert {fact: entry.get(fact) for fact in facts} == facts


def test_the_search_writes_a_reading_that_is_exact(monkeypatch):
    """Cohere 2: interleaved pairs, and full-attention layers without RoPE."""
    findings, lost = search.sought("cohere2")
    assert lost == []
    tables = written.family_tables("cohere2", findings)
    (entry,) = tables["attention"]
    assert (entry["rope"], entry["rope_kinds"], entry["causal"]) == ("interleaved", ["sliding_attention"], True)
    text = written.as_toml(tables, "found")
    assert 'query = "layers.{layer}.self_attn.q_proj"' in text
    assert parse("cohere2", tomllib.loads(text)).attention == parse("cohere2", tables).attention


@pytest.mark.slow
def test_proofs_are_kept(tmp_path):
    cache = tmp_path / "proofs.jsonl"
    seen = []
    first = sweep(["gpt2", "frobnicate"], cache, seen.append)
    assert [proof.status for proof in first] == ["exact", "cannot be built"]
    assert sweep(["gpt2", "frobnicate"], cache, seen.append) == first
    assert len(seen) == 2
    assert set(cached(cache)) == {"gpt2", "frobnicate"}


@pytest.fixture
def quick_proofs(monkeypatch):
    """Proofs that are made in no process."""

    def quick(types):
        return (Proof(name, "cannot be built", "for a test", transformers=version("transformers")) for name in types)

    monkeypatch.setattr(sweep_module, "_proofs", quick)


@pytest.mark.usefixtures("quick_proofs")
def test_a_line_of_which_a_part_was_written_is_proven_again(tmp_path):
    cache = tmp_path / "proofs.jsonl"
    sweep(["frobnicate"], cache)
    whole = cache.read_text()
    cache.write_text(whole.strip()[:-9])  # a process was killed here
    assert cached(cache) == {}
    sweep(["nothing"], cache)
    assert set(cached(cache)) == {"nothing"}
    cache.write_text('{"a": 1}\n[]\n"b"\n' + whole)
    assert set(cached(cache)) == {"frobnicate"}


def test_a_cache_that_is_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "proofs.jsonl")
    with pytest.raises(ValueError, match="is a device or a pipe; expected a regular file"):
        sweep(["gpt2"], tmp_path / "proofs.jsonl")


@pytest.mark.slow
def test_nothing_is_read_wrongly():
    """All config types, 20 minutes: none is wrong, none loses layers, and as many are exact as the docs say."""
    proofs = sweep()
    count = counts(proofs)
    assert count["wrong"] == count["missing layers"] == 0
    assert sum(proof.status == "exact" and not proof.content for proof in proofs) >= 620


@pytest.mark.usefixtures("quick_proofs")
def test_the_command(tmp_path, capsys):
    main(["prove", "frobnicate", "--json", str(tmp_path / "proofs.json")])
    assert capsys.readouterr().out.startswith("frobnicate: cannot be built")
    assert '"model_type": "frobnicate"' in (tmp_path / "proofs.json").read_text()
