"""The study of vision and language: its scenes, its exams, and what is made of them."""

import dataclasses
import io
import itertools

import numpy as np
import pytest
import torch
from keyquery_studies.vision_language import study as vision_language
from keyquery_studies.vision_language import trial as vision_trials
from keyquery_studies.vision_language.scenes import (
    CIFAR,
    DIRECTED,
    RECIPROCAL,
    Said,
    Scene,
    Things,
    cifar,
    drawn,
    scenes,
    unsaid,
)
from keyquery_studies.vision_language.study import VisionLanguageStudy, correlated, variants_of
from keyquery_studies.vision_language.study import run as run_vision_language
from keyquery_studies.vision_language.trial import ParserTrial, asked_of, dino_model, reading_others
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.pages import terminal


def test_sentences_are_true_where_they_are():
    cells = (0, 1, 2, -1)
    scene = Scene(cells, Said(0, "left of", 1))
    true = {
        ("left of", 0, 1),
        ("above", 0, 2),
        *((relation, a, b) for relation in ("beside",) for a, b in ((0, 1), (1, 0))),
        *(("and", a, b) for a, b in itertools.permutations((0, 1, 2), 2)),
    }
    for relation in (*DIRECTED, *RECIPROCAL):
        for a, b in itertools.permutations(range(4), 2):
            assert scene.true(Said(a, relation, b)) == ((relation, a, b) in true)


def test_pairs_that_are_asked_about_are_never_learned_from():
    learned, asked = scenes(10, 400, seed=0), scenes(10, 400, seed=0, test=True)
    apart = unsaid(10)
    for scene in learned:
        there = [thing for thing in scene.cells if thing >= 0]
        assert not any(frozenset(pair) in apart for pair in itertools.combinations(there, 2))
    for scene in asked:
        assert frozenset((scene.said.first, scene.said.second)) in apart
    for scene in learned + asked:
        assert scene.true(scene.said)
        assert scene.true(scene.said.exchanged()) == (scene.said.relation in RECIPROCAL)
        assert scene.cells.count(-1) in (0, 2)
    directed = [scene for scene in asked if scene.said.relation in DIRECTED]
    assert 150 < len(directed) < 250
    assert {scene.said.relation for scene in asked} == {*DIRECTED, *RECIPROCAL}


def things(count=12, seed=0):
    """Eight things of one grey each, so that an image tells what is in its cells."""
    labels = np.repeat(np.arange(8), count)
    pixels = np.broadcast_to((30 * labels + 10).astype(np.uint8)[:, None, None, None], (len(labels), 8, 8, 1))
    return Things(pixels.copy(), labels, CIFAR[:8])


def test_images_show_what_is_in_the_cells():
    made, wanted = things(), scenes(8, 30, seed=0, test=True, grids=0.0)
    for image, scene in zip(drawn(made, wanted, 0), wanted, strict=True):
        for cell, thing in enumerate(scene.cells):
            part = image[8 * (cell // 2) :, 8 * (cell % 2) :][:8, :8]
            assert (part == (30 * thing + 10 if thing >= 0 else 0)).all()
    numbered = Things(np.arange(80, dtype=np.uint8).reshape(80, 1, 1, 1), np.arange(80) % 8, CIFAR[:8])
    halves = [set(numbered.half(test).pixels.flatten().tolist()) for test in (False, True)]
    assert not halves[0] & halves[1]
    assert len(halves[0] | halves[1]) == 80
    assert len(halves[1]) == 16


def test_what_is_asked_beside_is_false(monkeypatch):
    monkeypatch.setattr(vision_trials, "TESTED", 60)
    labels = np.repeat(np.arange(10), 6)
    asked = asked_of(Things(np.zeros((60, 2, 2, 1), np.uint8), labels, CIFAR), seed=0)
    for scene, other, replaced in zip(asked.scenes, asked.others, asked.replaced, strict=True):
        assert not scene.true(other)
        assert not scene.true(replaced)
        assert (replaced.first == scene.said.first) != (replaced.second == scene.said.second)


def test_an_interval_holds_what_it_is_of():
    rng = np.random.default_rng(0)
    groups = [[(a, 2 * a + 0.01 * b) for a, b in rng.normal(size=(5, 2))] for _ in range(8)]
    found = correlated(groups, draws=200)
    assert found["low"] <= found["correlation"] <= found["high"]
    assert found["low"] > 0.9
    lots = correlated([[tuple(pair) for pair in rng.normal(size=(5, 2))] for _ in range(8)], draws=200)
    assert lots["low"] < 0 < lots["high"]


def test_words_read_other_images_in_one_layer_alone():
    torch.manual_seed(0)
    encoder, x = kq.Encoder(8, depth=2, heads=2).eval(), torch.randn(3, 6, 8)  # a first token, three patches, two words
    before, tokens = encoder(x), 3
    with reading_others(encoder.blocks[1], tokens):
        inside = encoder(x)
    assert torch.equal(encoder(x), before)
    assert torch.allclose(inside[:, 1:4], before[:, 1:4], atol=1e-6)  # patches see their own
    deep = encoder.blocks[0](x)
    swapped = torch.cat((deep[:, :1], deep[:, 1:4].roll(1, 0), deep[:, 4:]), 1)
    block = encoder.blocks[1]
    heard = deep + block.attention(block.attention_norm(swapped))
    expected = encoder.norm(heard + block.mlp(block.mlp_norm(heard)))
    assert torch.allclose(inside[:, 4:], expected[:, 4:], atol=1e-5)
    assert not torch.allclose(inside[:, 4:], before[:, 4:], atol=1e-2)


def test_dino_is_built_of_its_weights_alone(tmp_path):
    transformers = pytest.importorskip("transformers")
    from keyquery_studies.rerank.embeddings import dino

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "patch_size": 4, "image_size": 16}
    model = transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).eval()
    old = {new: name for name, new in vision_trials.RENAMED.items()}
    weights = {}
    for name, weight in model.state_dict().items():
        for new, before in old.items():
            name = name.replace(new, before)
        weights[name] = weight
    save_file(weights, tmp_path / "dino.safetensors")
    x = torch.randn(2, 3, 24, 24)
    found = dino_model(tmp_path / "dino.safetensors")(x).last_hidden_state
    assert torch.allclose(found, model(x).last_hidden_state, atol=1e-6)
    assert torch.allclose(found, dino(x, weights), atol=1e-4)
    weights.pop("encoder.layer.1.mlp.fc2.bias")
    save_file(weights, tmp_path / "dino.safetensors")
    with pytest.raises(
        ValueError, match=r"is an incomplete DINOv2 backbone: it lacks encoder\.layer\.1\.mlp\.fc2\.bias"
    ):
        dino_model(tmp_path / "dino.safetensors")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """All of it in small: a variant, of photographs that are none."""
    folder, made = tmp_path_factory.mktemp("vision"), things()
    names = np.array(CIFAR[:8])
    np.savez(folder / "images.npz", images=np.repeat(made.pixels, 3, -1), labels=made.labels, classes=names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision_trials, "TESTED", 24)
        patch.setattr(vision_trials, "FOLLOWED", 2)
        patch.setitem(vision_trials.SIZES, "cifar", {"size": 16, "patch": 8, "masked": 0.4})
        options = {
            "seeds": (0,),
            "epochs": 1,
            "scenes": 32,
            "device": "cpu",
            "sets": ["cifar"],
            "variants": ["symmetric"],
        }
        return run_vision_language(folder / "images.npz", folder / "out", **options), folder


@pytest.mark.slow
def test_the_study_tells_every_figure(study, tmp_path, monkeypatch):
    monkeypatch.setattr(vision_language, "DRAWS", 20)
    reading, _ = study
    assert [(row["dataset"], row["variant"]) for row in reading.rows] == [("cifar", "symmetric")]
    row = reading.rows[0]
    assert all(0 <= row[name] <= 1 for name in ("matching", "relations", "filled", "texts_at_1", "images_at_10"))
    assert row["texts_at_1"] <= row["texts_at_5"] <= row["texts_at_10"]
    assert len(row["course"]) == 2  # before the one step and after it
    assert len(row["layers"]) == 3
    symmetric = [one for one in reading.turned() if (one["variant"], one["part"]) == ("symmetric", "skew")]
    assert symmetric
    assert all(abs(one["change"]) < 1e-4 for one in symmetric)  # it has none
    assert reading.correlations() == []  # one training tells nothing of spread
    reading = dataclasses.replace(reading, rows=list(reading.rows) * 3)
    assert len(reading.correlations()) == 2 * 4
    assert kq.Reading.load(reading.to_json()) == reading
    assert isinstance(reading, VisionLanguageStudy)
    said = io.StringIO()
    terminal.show(reading, Console(file=said, width=100))
    assert all(word in said.getvalue() for word in ("relations", "R@10", "skew", "correlation"))
    pytest.importorskip("matplotlib")
    reading.plot().savefig(tmp_path / "study.svg")


def test_the_command_names_what_is_missing_and_reuses_what_is_done(study, tmp_path):
    runner = CliRunner()
    command = ["study", "vision-language", "--quiet", "--json", str(tmp_path / "a.json")]
    for more, said in (
        (["--dataset", "cifar"], "cifar needs images: pass a file or a folder as data"),
        (["--variant", "DINOv2"], "DINOv2 needs the weights of its backbone"),
        (["--dataset", "mnist"], "set must be one of 'digits', 'fine digits', 'cifar'"),
        (["--variant", "symetric"], "did you mean 'symmetric'"),
    ):
        found = runner.invoke(cli.app, [*command, *more])
        assert said in str(found.exception)
    assert variants_of("digits", dino=True) == tuple(name for name in vision_trials.VARIANTS if name != "DINOv2")
    assert not (tmp_path / "a.json").exists()


def test_photographs_need_names_and_labels(tmp_path):
    made = things()
    np.savez(tmp_path / "a.npz", images=made.pixels)
    with pytest.raises(ValueError, match="has no labels"):
        cifar(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", images=made.pixels, labels=made.labels % 3, classes=np.array(["a", "b", "c"]))
    with pytest.raises(ValueError, match="must have at least 8 classes"):
        cifar(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", images=made.pixels, labels=made.labels)
    assert cifar(tmp_path / "c.npz", most=4).pixels.shape == (32, 8, 8, 1)


@pytest.mark.slow
@pytest.mark.unchecked
def test_it_learns_relations_of_things_that_were_never_said_together(tmp_path):
    """The learning oracle: digits of images never seen, in pairs never said; chance when images are shuffled."""
    pytest.importorskip("sklearn")
    sizes = {"epochs": vision_language.EPOCHS, "count": vision_language.SCENES["digits"]}
    row = ParserTrial(dataset="digits", variant="parser", seed=0, **sizes).run(tmp_path, "cpu")
    assert row["matching"] >= 0.95
    assert row["relations"] >= 0.9
    assert 0.4 < row["shuffled_matching"] < 0.6
    assert 0.4 < row["shuffled_relations"] < 0.6
