"""The study of masks, small: arms differ in one factor, and its differences are those of its rows."""

import pytest
import torch
from keyquery_studies.mask import ARMS, Mask, Masks

from keyquery.layers import LanguageModel


def test_arms_differ_in_the_mask_or_in_the_objective():
    masked, causal, following = (
        arm for arm in Mask(vocabulary=300, width=8, depth=1, length=8, windows=(4, 8)).arms("digest") if not arm.rope
    )
    assert [arm.objective for arm in (masked, causal, following)] == list(ARMS)
    assert [arm.shape().causal for arm in (masked, causal, following)] == [False, True, True]
    torch.manual_seed(0)
    model, ids = LanguageModel(causal.shape()), torch.randint(2, 300, (1, 8))
    changed = ids.clone()
    changed[0, 5] = 2
    assert torch.equal(model(ids)[:, :5], model(changed)[:, :5])  # it sees earlier tokens alone


def row(objective, seed, position):
    parts = {"symmetry": 0.0, "symmetric": 1 - position, "skew": 0.0, "popularity": 0.0, "query_only": 0.0}
    head = {"window": 8, "layer": 0, "head": 0, **parts, "position": position, "interaction": 0.0}
    return {"objective": objective, "rope": False, "seed": seed, "lr": 1e-3, "loss": 1.0, "heads": [head]}


def test_changes_are_between_arms_that_differ_in_one_factor():
    shares = {"masked": (0.1, 0.2), "masked causal": (0.4, 0.6), "next token": (0.5, 0.6)}
    models = [row(objective, seed, share) for objective, pair in shares.items() for seed, share in enumerate(pair)]
    summary = {(r["factor"], r["part"]): r for r in Masks(models=models, rates=[]).summary()}
    assert summary["mask", "position"]["change"] == pytest.approx(0.35)
    assert summary["objective", "position"]["change"] == pytest.approx(0.05)
    assert summary["mask", "symmetric"]["change"] == pytest.approx(-0.35)
    half = 12.706205 * (0.05**2 * 2) ** 0.5 / 2**0.5  # t of one degree of freedom
    assert summary["mask", "position"]["high"] == pytest.approx(0.35 + half, rel=1e-5)


def test_windows_are_not_longer_than_those_of_the_training():
    with pytest.raises(ValueError, match=r"windows must be from 1 to 8 tokens long, got \(4, 9\)"):
        Mask(windows=(4, 9), length=8).run(None, "cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("few_windows")
def test_every_head_of_every_model_is_measured_in_every_window(study, corpus):
    sizes = "--steps 1 --rate 0.001 --width 8 --depth 1 --length 8 --window 4 --window 8 --batch 4 --vocabulary 300"
    reading = study("mask", "--corpus", corpus, *sizes.split(), "--seed", 0, "--seed", 1)
    assert len(reading.models) == 2 * len(ARMS) * 2
    assert len(reading.records()) == len(reading.models) * 2 * 4
    assert {row["window"] for row in reading.records()} == {4, 8}
    titles = [axis.get_title() for axis in reading.plot().get_axes()]
    assert titles[:2] == ["masked, learned", "masked causal, learned"]
