"""The study of objectives, small: it runs, records, resumes, and what it writes can be looked at."""

import json

import pytest
import torch
from keyquery_studies.common.objectives import SHARES, Task
from keyquery_studies.objectives.study import Objectives, recorded
from keyquery_studies.objectives.study import run as run_objectives

import keyquery as kq
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.layers import LanguageModel, Shape

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_windows")]  # they train
TINY = Shape(vocab_size=300, width=16, depth=2, num_attention_heads=2, length=16)


@pytest.fixture(scope="module")
def study(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return run_objectives(corpus, out, seeds=(0, 1), steps=12, shape=TINY, device="cpu", about="A tale."), out


def test_every_head_is_recorded_at_every_step_asked_for(study):
    reading, _ = study
    places = {(r["objective"], r["seed"], r["step"], r["layer"], r["head"]) for r in reading.heads}
    assert len(places) == len(reading.heads) == 2 * 2 * len(recorded(12)) * 2 * 2
    for row in reading.heads:
        assert sum(row[name] for name in SHARES) == pytest.approx(1)


def test_the_summary_is_mean_and_spread_over_seeds(study):
    reading, _ = study
    row = next(r for r in reading.summary() if (r["objective"], r["layer"]) == ("next token", 1))
    each = [
        sum(r["symmetry"] for r in reading.heads if (r["objective"], r["layer"], r["step"], r["seed"]) == key) / 2
        for key in [("next token", 1, 12, 0), ("next token", 1, 12, 1)]
    ]
    assert row["symmetry"] == pytest.approx(sum(each) / 2)
    assert row["symmetry_sd"] == pytest.approx(abs(each[0] - each[1]) / 2**0.5)


def test_onsets_by_hand():
    def row(step, part):
        shares = {name: float(name == part) for name in ("symmetric", "skew", "popularity", "position")}
        return {"objective": "masked", "seed": 0, "layer": 0, "head": 0, "step": step, "symmetry": 0.0, **shares}

    rows = [row(0, "symmetric"), row(8, "position"), row(16, "symmetric"), row(20, "position")]
    reading = Objectives(heads=rows, losses=[], shape={}, recipe={})
    assert reading.onsets()[0]["part"] == "position"
    assert reading.onsets()[0]["since"] == 20


def test_means_are_by_position(corpus):
    """A model of positions alone: with means over all positions these would count as popularity."""
    torch.manual_seed(0)
    model = LanguageModel(TINY)
    model.tokens.weight.data.zero_()
    ids = torch.randint(2, 300, (5000,))
    rows = Task("next token", ids, ids, 16, Tokenizer.load(kq.models.ENCODER)).look(model)
    assert min(row["position"] for row in rows if row["layer"] == 0) > 0.99


def test_studies_of_former_versions_load():
    shares = {"reciprocal": 0.5, "directional": 0.3, "popularity": 0.2}
    row = {"objective": "masked", "seed": 0, "layer": 0, "head": 0, "step": 9, "symmetry": 0.25, **shares}
    rows = [row, {**row, "objective": "next token"}]
    old = {"schema": 1, "kind": "objectives", "heads": rows, "losses": [], "shape": {}, "recipe": {}}
    reading = kq.Reading.load(json.dumps(old))
    assert reading.shares() == ("symmetric", "skew", "popularity")
    assert {name: reading.summary()[0][name] for name in reading.shares()} == dict(
        zip(reading.shares(), shares.values(), strict=True)
    )
    assert reading.onsets()[0]["part"] == "symmetric"


def test_the_models_written_stand_alone(study):
    _, out = study
    for name in ("encoder", "decoder"):
        folder = out / name
        assert {file.name for file in folder.iterdir()} == {
            "README.md",
            "config.json",
            "log.json",
            "model.safetensors",
            "tokenizer.json",
        }
        assert "A tale." in (folder / "README.md").read_text()
        reading = kq.look(folder, text=kq.models.TEXT, length=16, tokens=1024)
        assert len(reading.heads) == 4
    assert not list(out.rglob("*.checkpoint"))


@pytest.mark.slow
def test_studies_of_other_settings_never_mix(corpus, tmp_path):
    options = {"steps": 20, "shape": TINY, "device": "cpu"}
    run_objectives(corpus, tmp_path, **options)
    before = (tmp_path / "encoder" / "model.safetensors").read_bytes()
    other = {**options, "shape": Shape(**{**TINY.to_dict(), "vocab_size": 320})}
    with pytest.raises(FileExistsError, match="belongs to another study; --force replaces it"):
        run_objectives(corpus, tmp_path, **other)
    assert (tmp_path / "encoder" / "model.safetensors").read_bytes() == before
    run_objectives(corpus, tmp_path, **other, force=True)
    assert len(Tokenizer.load(tmp_path / "encoder")) == 320


def test_masking_follows_the_published_shares(corpus):
    tokenizer = Tokenizer.load(kq.models.ENCODER)
    ids = torch.randint(2, 4096, (5000,))
    task = Task("masked", ids, ids, 64, tokenizer)
    inputs, targets = task.draw(0, torch.Generator().manual_seed(0))
    asked = targets >= 0
    assert asked.float().mean() == pytest.approx(0.15, abs=0.01)
    hidden = inputs == tokenizer.mask_token_id
    assert (hidden & asked).sum() / asked.sum() == pytest.approx(0.8, abs=0.03)
    assert ((inputs == targets) & asked).sum() / asked.sum() == pytest.approx(0.1, abs=0.03)
    assert not (hidden & ~asked).any()


def test_next_token_targets_are_the_next_tokens():
    ids = torch.arange(500) % 97
    task = Task("next token", ids, ids, 16, Tokenizer.load(kq.models.ENCODER))
    inputs, targets = task.draw(0, torch.Generator().manual_seed(0))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal((inputs + 1) % 97, targets)
