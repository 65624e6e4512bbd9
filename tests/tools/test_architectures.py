"""Tools of developers: the search for the TOML of an architecture, and configs of many types that are tried."""

import json
import os
import tomllib
from collections import Counter

import pytest

pytest.importorskip("transformers", reason="proofs need the extra hf")

from keyquery.checkpoints.family import parse
from keyquery.proof.models import model_types
from tools.architectures import page, search, sensitivity, table, written
from tools.architectures.__main__ import main


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


VARIANTS = [  # a type, what is changed in its config, and what comes of it
    ("llama", {}, "exact"),
    ("llama", {"rms_norm_eps": 0.2}, "exact"),
    ("llama", {"max_position_embeddings": 99}, "inert"),
    ("falcon", {"alibi": True}, "wrong"),  # the model rounds it to bfloat16
    ("gpt2", {"add_cross_attention": True}, "refused"),
    ("llama", {"num_attention_heads": 3}, "cannot be built"),
    ("resnet", {}, "no softmax attention"),
]


@pytest.mark.parametrize(("name", "change", "status"), VARIANTS)
def test_what_a_changed_field_does_is_found(name, change, status):
    assert sensitivity.answer({"type": name, "change": change})["status"] == status


def test_fields_that_attention_reads_are_varied_and_others_are_not():
    row = sensitivity.answer({"type": "gemma2", "list": True})
    assert {"attn_logit_softcapping", "sliding_window", "layer_types", "query_pre_attn_scalar"} <= set(row["varied"])
    assert not {"vocab_size", "intermediate_size", "attention_dropout", "use_cache"} & set(row["varied"])
    assert {"layer_types": ["full_attention"] * 4} in row["changes"]  # each layer of the other kind, and all of one


LISTING = {
    "type": "x",
    "list": True,
    "status": "listed",
    "transformers": "5",
    "base": {"size": 4, "mode": "a", "flag": False},
    "defaults": {"size": 8, "mode": "a", "flag": False, "other": 1},
    "fields": ["size", "mode"],
    "names": ["size", "mode", "flag", "other"],
}


def rows_of(*tried):
    rows = [{"type": "x", "change": change, "status": status, "transformers": "5"} for change, status in tried]
    listing = {**LISTING, "changes": [change for change, _ in tried]}
    return [listing, {**rows[0], "content": False, "family": "llama", "modules": 2, "tensors": ["a.weight"]}, *rows[1:]]


@pytest.mark.parametrize(
    ("tried", "moves", "pairs", "ignored"),
    [
        ([({"size": 5}, "exact"), ({"other": 2}, "inert")], {"size": None}, [], []),
        ([({"size": 5}, "wrong")], {"size": [8, 4]}, [], []),
        ([({"size": 5}, "refused"), ({"size": 6}, "exact")], {"size": None}, [], []),
        ([({"flag": True}, "exact")], {"flag": [False, True]}, [], []),
        ([({"mode": "b"}, "exact"), ({"mode": "c"}, "wrong")], {"mode": ["a", "b"]}, [], []),
        ([({"mode": "b"}, "ignored")], {}, [], ["mode"]),
        ([({"new": True}, "no softmax attention")], {"new": [None]}, [], []),
        ([({"size": 5}, "ignored")], {"size": [8, 4]}, [], []),
        (
            [({"size": 5}, "exact"), ({"flag": True}, "exact"), ({"size": 5, "flag": True}, "wrong")],
            {"flag": [False, True], "size": None},
            [{"size": 5, "flag": True}],
            [],
        ),
        ([({"size": 5, "mode": "c"}, "wrong"), ({"size": 5}, "exact")], {"mode": ["a"], "size": None}, [], []),
    ],
)
def test_the_table_says_what_is_proven(tried, moves, pairs, ignored):
    rows = rows_of(({}, "exact"), *tried)
    known = table.facts(rows)
    assert ({n: v and sorted(v, key=str) for n, v in known[0].items()}, known[2], known[4]) == (
        {n: v and sorted(v, key=str) for n, v in moves.items()},
        pairs,
        ignored,
    )
    assert known[3] == ["a.weight"]
    assert {"size", "mode", "flag", "other"} <= {*known[0], *known[1]}
    bad = sum(status in table.BAD for change, status in tried if not change.keys() & set(ignored))
    text = page.page(rows)
    compared = [status for _, status in tried if status != "no softmax attention"]
    assert f"Of {len(compared) + 1} configs" in text
    assert f"and {bad} would be read wrongly" in " ".join(text.split())


def test_nothing_is_known_of_a_type_whose_default_is_not_read():
    assert table.facts(rows_of(({}, "wrong"), ({"size": 5}, "exact")))[0] is None
    rows = rows_of(({}, "exact"), ({"size": 5}, "exact"), ({"size": 6}, "wrong"))
    assert table.facts(rows)[0] is not None
    assert table.facts(rows[:-1])[0] is None  # a sweep that was stopped


@pytest.fixture
def quick_answers(monkeypatch):
    """Answers that no process gives."""
    monkeypatch.setattr(sensitivity, "answered", lambda module, jobs: ((job, "for a test") for job in jobs))


@pytest.mark.usefixtures("quick_answers")
def test_a_line_of_which_a_part_was_written_is_tried_again(tmp_path):
    cache = tmp_path / "rows.jsonl"
    rows = list(sensitivity.sweep(["nothing"], cache))
    assert [row["status"] for row in rows] == ["cannot be built", "cannot be built"]
    whole = cache.read_text()
    cache.write_text(whole.strip()[:-9])  # a process was killed here
    assert list(sensitivity.sweep(["nothing"], cache)) == rows
    assert [json.loads(line) for line in cache.read_text().splitlines() if line.endswith("}")] == rows


@pytest.mark.usefixtures("quick_answers")
def test_the_command_tries_types_and_writes_no_table_of_some(tmp_path, capsys):
    before = table.FILE.read_bytes()
    main(["fields", str(tmp_path / "rows.jsonl"), "nothing"])
    assert capsys.readouterr().out == "cannot be built: 1\n"
    assert table.FILE.read_bytes() == before


def test_a_cache_that_is_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="is a device or a pipe; expected a regular file"):
        list(sensitivity.sweep(["gpt2"], tmp_path / "rows.jsonl"))


@pytest.mark.slow
def test_no_default_config_is_read_wrongly(tmp_path):
    """All config types, in worker processes, 20 minutes: as many are exact as the docs say."""
    rows = list(sensitivity.sweep(model_types(), tmp_path / "rows.jsonl", defaults=True))
    counts = Counter(row["status"] for row in rows if "change" in row)
    assert not any(counts[status] for status in table.BAD)
    assert sum(row["status"] == "exact" and not row["content"] for row in rows) >= 620
