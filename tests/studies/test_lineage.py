"""The study of lineage: its models are those of transformers, its changes are what they are called."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from keyquery_studies.lineage import changes
from keyquery_studies.lineage.kin import DISGUISES, disguises
from keyquery_studies.lineage.models import SIZES, as_model, batches, initial, logits, loss, together, trained
from keyquery_studies.lineage.rows import write_facts
from keyquery_studies.lineage.study import run
from keyquery_studies.lineage.summary import kinds, nulls, uniformity
from keyquery_studies.lineage.training import Plan

gguf = pytest.importorskip("gguf")


def models(size, count=2):
    torch.manual_seed(0)
    weights = initial(size, range(count))
    return {name: value + 0.1 * torch.randn_like(value) for name, value in weights.items()}


def first(weights):
    return {name: value[0] for name, value in weights.items()}


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_models_side_by_side_are_those_of_transformers(size):
    weights, tokens = models(size), torch.randint(256, (2, 3, 9), generator=torch.Generator().manual_seed(0))
    found = logits(size, weights, tokens)
    for number in range(2):
        model = as_model(size, {name: value[number] for name, value in weights.items()})
        with torch.no_grad():
            assert torch.allclose(model(tokens[number]).logits, found[number], atol=1e-4)


@pytest.mark.parametrize("change", ["turned", "heads_permuted", "heads_rotated", "heads_rescaled", "disguised"])
def test_disguises_change_weights_and_not_the_model(change):
    size, draw = SIZES[1], torch.Generator().manual_seed(0)
    weights = first(models(size))
    arguments = (weights, changes.random_rotation(size.width, draw)) if change == "turned" else (size, weights, draw)
    other = getattr(changes, change)(*arguments)
    tokens = torch.randint(256, (1, 3, 9), generator=draw)
    before, after = (logits(size, {name: v[None] for name, v in w.items()}, tokens) for w in (weights, other))
    assert torch.allclose(before, after, atol=1e-4)
    assert (other["query"] - weights["query"]).norm() > 0.1 * weights["query"].norm()


@pytest.mark.parametrize(("kind", "function"), [("Q8_0", changes.q8_0), ("Q4_0", changes.q4_0)])
def test_quantisation_is_that_of_gguf(kind, function):
    value = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0))
    code = gguf.GGMLQuantizationType[kind]
    expected = gguf.quants.dequantize(gguf.quants.quantize(value.numpy(), code), code)
    assert np.array_equal(function(value).numpy(), expected)


def test_merges_by_hand():
    base, one, two = ({"w": torch.tensor(row)} for row in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0]))
    assert changes.merged(one, two, 0.25)["w"].tolist() == [0.25, 0.75]
    assert changes.task_vectors(base, [one, two])["w"].tolist() == [1.0, 1.0]
    assert changes.slerped(one, two, 0.5)["w"].tolist() == pytest.approx([0.5**0.5] * 2)


@pytest.mark.parametrize("lora", [False, True])
def test_seeds_trained_together_are_those_trained_alone(lora):
    size = SIZES[0]
    weights, text = initial(size, [0, 1]), torch.arange(3000) % 61
    draw = batches(text, [(0, 3000)] * 2, [5, 6], 4, 2, 8)
    torch.manual_seed(0)
    jobs = {"these": trained(size, weights, draw, 3e-3, 4, lora=lora)}
    if not lora:  # adapters are drawn for all models at once
        single = batches(text, [(0, 3000)], [6], 4, 2, 8)
        jobs["second"] = trained(size, initial(size, [1]), single, 3e-3, 4)
    found = together(jobs)
    models = found["these"][4]
    assert float(loss(size, models, draw(0)).sum()) < float(loss(size, weights, draw(0)).sum())
    if not lora:
        assert torch.allclose(models["query"][1], found["second"][4]["query"][0], atol=1e-4)


@pytest.mark.parametrize("kept", [(1, 3), (2,)])
def test_models_are_kept_on_the_way(kept):
    size, text = SIZES[0], torch.arange(500) % 61
    draw = batches(text, [(0, 500)], [0], 4, 2, 8)
    found = together({"a": trained(size, initial(size, [0]), draw, 3e-3, 4, kept=kept)})["a"]
    assert sorted(found) == [*kept, 4]
    stopped = together({"a": trained(size, initial(size, [0]), draw, 3e-3, 4, kept=kept, end=0.0)})["a"]
    assert sorted(stopped) == [1]


@pytest.mark.slow
def test_p_values_of_pairs_that_share_models():
    """Uniform ones pass all tests; those of a wrong location fail them."""
    draw = np.random.default_rng(0)
    rows = [{"first": a, "second": b} for a, b in itertools.combinations(range(40), 2)]
    p = draw.random(len(rows))
    right, wrong = uniformity(rows, p), uniformity(rows, p**3)
    assert min(right[name] for name in ("ks_p", "models_p", "disjoint_p")) > 0.05
    assert max(wrong[name] for name in ("ks_p", "models_p", "disjoint_p")) < 0.05
    by_model = draw.normal(size=40)
    shared = np.array([math.erfc((by_model[r["first"]] + by_model[r["second"]]) / 2) / 2 for r in rows])
    dependent = uniformity(rows, shared)
    assert dependent["ks_p"] < 1e-3  # as if 780 pairs were independent
    assert dependent["models_p"] > 0.05
    assert dependent["disjoint_p"] > 0.05


def test_summaries_by_hand(monkeypatch):
    monkeypatch.setattr("keyquery_studies.lineage.summary.MATCHINGS", 20)  # of p-values that are not read here
    names = [f"m{i}" for i in range(8)]
    null = [
        {"config": "c", "set": kind, "first": a, "second": b, "free": 0.1 * i, "shared": -1.0 * i}
        for kind in ("calibrate", "test")
        for i, (a, b) in enumerate(itertools.pairwise(names))
    ]
    made = {"kind": "copy", "label": "identical", "change": 0.0, "loss": 2.0, "base_loss": 1.5, "merge": [], "base": 0}
    (row,) = kinds([{**made, "free": 50.0, "shared": 0.0}, {**made, "free": 40.0, "shared": -6.0}], null)
    assert (row["free_area"], row["found"], row["loss"]) == (1.0, 2, 0.5)
    assert row["shared_area"] == pytest.approx((6.5 + 0.5) / 14)
    assert {r["alarms"] for r in nulls(null)} == {0}
    assert nulls(null)[0]["mean"] == pytest.approx(0.3)


@pytest.mark.parametrize("kind", DISGUISES)
def test_disguised_models_are_the_same_models(kind):
    size = SIZES[0]
    base = first(models(size))
    other = disguises(size, base, 7)[kind]
    tokens = torch.randint(256, (1, 3, 9), generator=torch.Generator().manual_seed(0))
    before, after = (logits(size, {name: v[None] for name, v in w.items()}, tokens) for w in (base, other))
    assert torch.allclose(before, after, atol=1e-4)
    norms = [
        weights["query"].unflatten(1, (size.groups, -1)).norm(dim=(2, 3)).sort(1).values
        for weights in (changes.folded(base) if kind == "all but rescaling" else base, other)
    ]
    assert torch.allclose(*norms, rtol=1e-4) == (kind == "all but rescaling")


def rows_in(folder, seed=1):
    folder.mkdir()
    plan = Plan(seed=seed)
    write_facts(folder, plan, "cpu", {"llama": 3})
    null = [
        {"config": "llama", "set": "test", "first": f"base-{a}", "second": f"base-{b}", "free": 0.1 * a, "shared": b}
        for a, b in itertools.combinations(range(12), 2)
    ]
    return plan, null


def test_rows_are_joined_in_an_order_of_their_own(tmp_path):
    readings = []
    for number, turn in enumerate((1, -1)):
        folder = tmp_path / str(number)
        _, null = rows_in(folder)
        (folder / "null.jsonl").write_text("".join(json.dumps(row) + "\n" for row in null[::turn]))
        readings.append(run([], folder, part="rows"))
    assert readings[0].null == readings[1].null == null
    readings[0].save(tmp_path / "first.json")
    with pytest.raises(ValueError, match="another seed"):
        run([], tmp_path / "1", part="rows", calibration=tmp_path / "first.json")
    rows_in(tmp_path / "other", seed=2)
    later = run([], tmp_path / "other", part="rows", calibration=tmp_path / "first.json")
    assert {row["set"] for row in later.null} == {"calibrate"}
    assert len({row["first"] for row in later.null} & {row["first"] for row in null}) == 0  # they are other models


def test_folders_of_other_settings_are_refused(tmp_path):
    plan, _ = rows_in(tmp_path / "run")
    with pytest.raises(ValueError, match=r"steps 2000 \(now 5\)"):
        run([], tmp_path / "run", replace(plan, steps=5), part="bases")
    with pytest.raises(ValueError, match="part must be one of"):
        run([], tmp_path / "run", part="some")
    with pytest.raises(ValueError, match="holds no rows"):
        run([], tmp_path / "none", part="rows")
