"""Same seed, same machine, same result: also in another process, whose sets are in another order."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from keyquery_studies.kernels.synthetic import TASKS, Trial
from keyquery_studies.objectives.study import run as run_objectives

import keyquery as kq
from keyquery.layers import Shape

QUICK = {"device": "cpu", "random_state": 0}
X, Y = np.random.default_rng(0).normal(size=(12, 6)), np.array(list("abcabcabcabc"))
GROUPS = [0] * 6 + [1] * 6


def look():
    return kq.look(kq.models.DECODER, text=kq.models.TEXT, tokens=300, length=32, directions=1, sample=4).to_json()


def look_shared_by_threads():
    return kq.look(kq.models.ENCODER, workers=2).to_json()


def causes():
    maps = torch.softmax(torch.from_numpy(np.random.default_rng(1).normal(size=(2, 6, 6))), -1)
    return kq.causes(maps).to_json()


def series():
    made = kq.SeriesClassifier(width=8, heads=2, depth=1, epochs=2, **QUICK).fit(X[:, :, None], Y)
    return [made.predict_proba(X[:, :, None]).tolist(), made.importance(X[:1, :, None], stretch=3).to_json()]


def events():
    made = kq.EventModel(width=8, heads=2, window=3, epochs=2, **QUICK).fit(Y, np.arange(12.0), GROUPS)
    return made.evaluate(Y, np.arange(12.0), GROUPS).to_json()


def rows():
    return kq.NPTClassifier(embedding=8, heads=2, depth=1, steps=3, **QUICK).fit(X, Y).predict_proba(X).tolist()


def transport():
    made = kq.TransportClassifier(epochs=2, **QUICK).fit(np.repeat(X, 2, 0)[:, :2], np.repeat(Y, 2))
    return made.predict_proba(X[:, :2]).tolist()


def trial():
    return Trial(TASKS[0], "split", 60, seed=0, steps=30).run(Path(), "cpu")


def study():
    shape = Shape(vocab_size=300, width=8, depth=1, num_attention_heads=2, length=16)
    return run_objectives(kq.models.TEXT, steps=4, shape=shape, device="cpu").to_json()


ALL = [look, look_shared_by_threads, causes, series, events, rows, transport, trial, study]


def told():
    """A digest of what each says."""
    torch.set_num_threads(1)
    found = {}
    for one in ALL:
        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))  # what the user's own generator says must not matter
        np.random.seed(int.from_bytes(os.urandom(4), "little"))
        found[one.__name__] = hashlib.sha256(json.dumps(one()).encode()).hexdigest()
    return found


@pytest.mark.slow
def test_two_processes_say_the_same():
    pytest.importorskip("tokenizers", reason="needs the extra hf")
    pytest.importorskip("ot", reason="needs the extra transport")
    script = "import json; from tests.test_same import told; print(json.dumps(told()))"
    environment = {**os.environ, "PYTHONHASHSEED": "1234", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as other:
        here = told()
        there = json.loads(other.stdout.read())
    assert here == there
    assert len(here) == len(ALL)


def test_a_look_names_the_tensors_that_it_read(tmp_path):
    """By their own bytes: the same in another file, another if one number is."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    folder = kq.models.ENCODER
    said = kq.look(folder).provenance["tensors"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name, digest in said.items():
            data = file.get_tensor(name).view(torch.uint8).numpy().tobytes()
            assert digest == hashlib.sha256(data).hexdigest()[:32], name
        assert set(said) < set(file.keys())  # only what was read
    tensors = load_file(folder / "model.safetensors")
    changed = next(name for name in said if "query" in name or "weight" in name)
    tensors[changed].view(-1)[0] += 1
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"another": "file"})
    other = kq.look(tmp_path).provenance["tensors"]
    assert {name for name in said if said[name] != other[name]} == {changed}


def test_a_live_model_has_the_digests_of_its_own_tensors():
    model = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2)
    said = kq.look(model).provenance["tensors"]
    weight = model.self_attn.in_proj_weight.detach()[:16].numpy().tobytes()
    assert said["self_attn.in_proj_weight[0:16]"] == hashlib.sha256(weight).hexdigest()[:32]
    assert set(kq.look(kq.Encoder(8, depth=1, heads=2)).provenance["tensors"])


@pytest.mark.parametrize("kind", ["versions", "tensors"])
def test_readings_say_what_they_are_of(kind):
    made = kq.SeriesClassifier(width=8, heads=2, depth=1, epochs=1, **QUICK).fit(X[:, :, None], Y)
    readings = [
        kq.look(torch.nn.MultiheadAttention(8, 2)),
        kq.causes(torch.eye(3)),
        kq.transport(torch.rand(3, 8, 2)),
        made.importance(X[:1, :, None], stretch=3),
        kq.BochnerTime(8).time_kernel(),
        kq.flow(torch.full((4, 4), 0.25), ["image", "image", "text", "text"]),
        kq.flow([torch.full((1, 2, 2), 0.5)] * 2, ["image", "text"]),
        kq.explain(kq.causes(torch.eye(3)), 1),
        kq.score_rankings([[0, 1]], [[1]]),
        kq.AffinityReranker(top=3, anchors=2, device="cpu").moves(torch.eye(4)[:1], torch.eye(4)),
        kq.Cooccurrence.from_text("a b a c", window=1).project(["a", "b"]),
    ]
    for reading in readings:
        assert reading.provenance[kind], reading.kind
    assert "random_state=0" in readings[3].provenance["estimator"]  # its seed
