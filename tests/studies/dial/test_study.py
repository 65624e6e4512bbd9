"""The study of the dial, small: what it turns off, what it finds, and that models are left as they were."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from keyquery_studies.dial.abilities import ABILITIES
from keyquery_studies.dial.study import Abilities, Subject, level_of, study, trials_of
from keyquery_studies.dial.study import run as run_dial
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.checkpoints.tokenizer import Tokenizer
from keyquery.instruments.ablation.losses import next_token_loss
from keyquery.layers import LanguageModel, Shape

pytestmark = pytest.mark.slow  # it trains

SHORT = {"by": "all", "sequences": 2, "length": 16, "device": "cpu"}
TALE = kq.models.TEXT.read_text()


@pytest.fixture(scope="module")
def reading():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keyquery_studies.dial.study.OTHERS", 32)
        few = [a for a in ABILITIES if a.name in ("next token", "duplicates", "masked words", "sentence halves")]
        patch.setattr("keyquery_studies.dial.study.ABILITIES", few)
        return run_dial([kq.models.DECODER, kq.models.ENCODER], [kq.models.TEXT], **SHORT)


class Few(Subject):
    """A model of which one ability is measured by head, and one is not."""

    def abilities(self):
        return [ability for ability in super().abilities() if ability.name in ("next token", "copying")]


class Reader(Subject):
    """A model of which only the loss on text is measured, which is faster."""

    def abilities(self):
        return [ability for ability in super().abilities() if ability.name == "next token"]


def subject(kind=Subject, **shape):
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "width": 32, "depth": 2, "length": 64}
    model = LanguageModel(Shape(**{**sizes, **shape})).eval()
    return kind.of("own", model, Tokenizer.load(kq.models.DECODER))


def changes(subject):
    rows = study(subject, {"tale": TALE}, "layer", [0], 4, 32)
    return {(row["part"], row["layer"], row["means"]): row["change"] for row in rows}


@pytest.mark.parametrize(
    ("by", "levels"),
    [pytest.param("all", 1, marks=pytest.mark.slow), pytest.param("layer", 2, marks=pytest.mark.slow), ("head", 3)],
)
def test_every_part_is_turned_off_everywhere_and_where_it_was_asked_for(by, levels):
    rows = list(study(subject(Few, causal=True, num_attention_heads=2), {"tale": TALE}, by, [0], 2, 16))
    # All heads: a dial of ones and each part, about three kinds of means. Only those by position have all five parts in
    # a model without rotary positions.
    wanted = {"all": 4 + 4 + 6, "layer": 5 * 2, "head": 5 * 4}
    for ability, reached in (("next token", levels), ("copying", min(levels, 2))):
        own = [row for row in rows if row["ability"] == ability]
        places = {(r["part"], r["layer"], r["head"], r["means"], r["source"]) for r in own}
        assert len(places) == len(own)
        expected = {level: wanted[level] for level in list(wanted)[:reached]}
        assert Counter(map(level_of, own)) == expected


def test_a_dial_of_ones_changes_nothing_and_parts_do(reading):
    ones = [row for row in reading.rows if row["part"] == "none"]
    assert len(ones) == 3 * (2 + 2)
    assert max(abs(row["change"]) for row in ones) < 1e-5
    plain = [r for r in reading.rows if (r["ability"], level_of(r)) == ("next token", "all") and r["part"] != "none"]
    assert min(abs(row["change"]) for row in plain) > 1e-4


def test_a_row_is_what_a_dial_of_its_heads_does():
    """By hand: the part off in those heads alone, about the means of the other windows."""
    own = subject(Reader, causal=True)
    rows = {
        (r["part"], r["layer"], r["head"]): r
        for r in study(own, {"tale": TALE}, "head", [0], 4, 32)
        if r["means"] == "data"
    }
    [trial] = trials_of(own, {"tale": TALE}, [0], 4, 32)
    for part, layer, head in (
        ("popularity", None, None),
        ("popularity", 1, None),
        ("symmetric", 0, 2),
        ("position", 0, None),
    ):
        heads = None if layer is None else f"{layer}.{'*' if head is None else head}"
        with (
            torch.no_grad(),
            kq.dial(own.model, **{part: 0}, heads=heads, data=[trial.others.inputs], means="position"),
        ):
            value = float(next_token_loss(own.model, trial.measured.inputs).mean())
        assert rows[part, layer, head]["value"] == pytest.approx(value, abs=1e-6)


def test_every_ability_is_tried_on_every_text_or_every_seed():
    trials = trials_of(subject(causal=True), {"tale": TALE}, [0, 1], 2, 16)
    on_seeds = dict.fromkeys(("repeated tokens", "copying", "look-ups", "duplicates"), 2)
    assert Counter(trial.ability.name for trial in trials) == {"next token": 1, "first-token mass": 1, **on_seeds}


def test_means_are_of_enough_other_sequences_for_means_by_position():
    for causal in (True, False):
        for trial in trials_of(subject(causal=causal), {"tale": TALE}, [0], 4, 256):
            assert len(trial.others.inputs["input_ids"]) >= 32
            rows = [
                {tuple(row) for row in some.inputs["input_ids"].tolist()} for some in (trial.measured, trial.others)
            ]
            assert not rows[0] & rows[1]


def test_a_study_that_was_interrupted_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr("keyquery_studies.dial.study.OTHERS", 32)

    def interrupted(items, what, total):
        for count, item in enumerate(items):
            if count == 20:
                raise KeyboardInterrupt
            yield item

    texts = {"tale": TALE, "end": TALE[len(TALE) // 2 :]}
    settings = (subject(Reader, causal=True), texts, "all", [0], 2, 16)
    whole = list(study(*settings))
    with pytest.raises(KeyboardInterrupt):
        list(study(*settings, interrupted, tmp_path))
    assert len(list(tmp_path.iterdir())) == 1  # of two texts
    told = []
    again = list(study(*settings, lambda items, what, total: told.append(total) or items, tmp_path))
    assert again == whole
    assert told == [len(whole) - 14] == [14]
    assert list(study(*settings, lambda items, what, total: told.append(total) or items, tmp_path)) == whole
    assert told[1] == 0
    other = subject(Reader, causal=True)
    other.model.tokens.weight.data *= 2
    next(study(other, *settings[1:], lambda items, what, total: told.append(total) or items, tmp_path))
    assert told[2] == len(whole)  # nothing is read of other weights


def test_studies_of_former_versions_load(made):
    old = made.to_json().replace('"symmetric"', '"reciprocal"').replace('"skew"', '"directional"')
    old = old.replace('"schema": 2', '"schema": 1')
    assert "reciprocal" in old
    assert kq.Reading.load(old) == made


def test_figures_agree_with_one_another(reading):
    for row in reading.rows:
        assert row["value"] - row["before"] == pytest.approx(row["change"], abs=1e-9)
        assert row["low"] <= row["change"] <= row["high"]
        assert row["sequences"] == (4 if row["ability"] == "duplicates" else 2)


def test_the_summary_is_mean_and_spread_over_seeds(made):
    other = [{**row, "source": "1", "change": row["change"] + 0.25} for row in made.rows if row["layer"] == 1]
    both = replace(made, rows=[*made.rows, *other])
    for level, sources in (("all", 1), ("layer", 2)):
        rows = [row for row in both.summary(level) if row["layer"] in (None, 1)]
        assert len(rows) == 2 * (4 + 3)
        for row in rows:
            change = 1.0 + ("symmetric", "skew", "popularity", "position").index(row["part"])
            assert row["sources"] == sources
            assert row["change"] == pytest.approx(change + (0.125 if sources == 2 else 0))
            assert row["sd"] == (pytest.approx(0.25 / 2**0.5) if sources == 2 else None)


def test_runs_made_apart_are_joined(made):
    def only(model, *more):
        kept = [row for row in made.rows if row["model"] == model]
        models = [one for one in made.models if one["name"] == model]
        return Abilities(models=models, abilities=made.abilities, rows=[*kept, *more], provenance={"of": model})

    again = {**made.rows[0], "change": 99.0}
    whole = Abilities.joined(only("one"), only("two", again))
    assert (whole.models, whole.abilities, whole.rows) == (made.models, made.abilities, made.rows)
    assert whole.provenance == {"runs": [{"of": "one"}, {"of": "two"}]}


def test_json_holds_all_of_it(reading):
    assert kq.Reading.load(reading.to_json()) == reading
    assert reading.kind == "dial"
    assert len(reading.records()) == len(reading.rows)
    facts = {model["name"]: model for model in reading.models}
    assert (facts["decoder"]["causal"], facts["decoder"]["precision"]) == (True, "bfloat16")
    assert facts["encoder"] | {"family": None} == {
        "name": "encoder",
        "family": None,
        "layers": 4,
        "heads": 16,
        "causal": False,
        "lm_head": True,
        "precision": "bfloat16",
        "vocabulary": 4096,
    }


def test_a_symmetric_model_has_no_direction_to_lose():
    found = changes(subject(Reader, causal=True, kernel="psd"))
    assert max(abs(change) for (part, *_), change in found.items() if part == "skew") < 1e-5
    assert max(abs(change) for (part, *_), change in found.items() if part == "symmetric") > 1e-5


def test_position_is_turned_off_where_places_enter_the_score():
    whole = ["symmetric", "skew", "popularity", "query_only", "position"]
    assert [subject(causal=True).parts(means) for means in ("batch", "global", "data")] == [whole[:3], whole[:3], whole]
    found = changes(subject(Reader, causal=True, rope=True))
    assert {(part, means) for part, _, means in found} == {
        (part, means) for part in ("none", *whole) for means in ("batch", "global", "data")
    }


def test_models_are_left_as_they_were():
    model = subject(causal=True).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = {"input_ids": torch.arange(5, 25)[None]}
    with torch.no_grad():
        out = model(**ids)
    model.train()
    list(study(Reader.of("own", model, Tokenizer.load(kq.models.DECODER)), {"tale": TALE}, "all", [0], 2, 16))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model._forward_hooks
    with torch.no_grad():
        assert torch.equal(model.eval()(**ids), out)


def test_progress_is_told_of_every_setting():
    told = []

    def watched(items, what, total):
        told.append((what, total, len(list(items))))
        return items

    rows = list(study(subject(Reader, causal=True), {"tale": TALE}, "all", [0], 2, 16, watched))
    assert told == [("own", len(rows), len(rows))]


def test_a_model_without_a_head_still_has_abilities():
    model = subject()
    silent = Subject.of("mute", model.model, model.tokenizer, lm_head=False)
    assert [one.name for one in silent.abilities()] == ["sentence halves"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "heads"}, "by must be .*did you mean 'head'"),
        ({"models": [kq.models.DECODER] * 2}, "models must have distinct names, got two called decoder"),
        ({"texts": [kq.models.TEXT] * 2}, "texts must have distinct names, got two called text.txt"),
        ({"texts": []}, "models, texts and seeds must each hold at least one"),
        ({"sequences": 1}, "sequences must be at least 2, got 1"),
    ],
)
def test_what_is_asked_for_is_checked_before_any_work(options, message):
    with pytest.raises(ValueError, match=message):
        run_dial(**{"models": [kq.models.DECODER], "texts": [kq.models.TEXT], **options})


@pytest.mark.slow
def test_the_command_runs_on_what_ships(tmp_path):
    files = [tmp_path / "dial.json", tmp_path / "dial.csv", tmp_path / "dial.png"]
    options = [text for file in files for text in (f"--{file.suffix[1:].replace('png', 'picture')}", str(file))]
    short = ["--by", "all", "--sequences", "2", "--length", "16"]
    done = CliRunner().invoke(cli.app, ["study", "dial", *short, *options])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines()[:-3])) <= 80
    for words in ("decoder: decoder, 4 layers, 16 heads, stored as bfloat16", "repeated tokens", "sentence halves"):
        assert words in done.stdout
    assert len(files[1].read_text().splitlines()) == 1 + len(json.loads(files[0].read_text())["rows"])
    assert files[2].read_bytes()[:4] == b"\x89PNG"


@pytest.fixture
def made():
    """A study by hand: two decoders, one of which has positions."""
    rows = [
        {"model": model, "ability": ability, "part": part, "layer": layer, "head": None, "means": "data", "source": "0"}
        | {"value": 3.0, "before": 2.0, "change": 1.0 + y, "low": 0.5 + y, "high": 1.5 + y, "sequences": 4}
        for model, count in (("one", 4), ("two", 3))
        for ability in ("next token", "repeated tokens")
        for y, part in enumerate(("symmetric", "skew", "popularity", "position")[:count])
        for layer in (None, 0, 1)
    ]
    models = [{"name": name, "layers": 2, "causal": True, "vocabulary": 100} for name in ("one", "two")]
    abilities = [{"name": name, "unit": "nats", "better": "lower"} for name in ("next token", "repeated tokens")]
    return Abilities(models=models, abilities=abilities, rows=rows)


def test_the_picture_sets_two_abilities_side_by_side_on_one_scale(made):
    figure = made.plot()
    panels = figure.axes
    assert len(panels) == 4
    assert [len(panel.patches) for panel in panels] == [4, 4, 3, 3]
    assert [panel.get_title() for panel in panels[:2]] == ["plain text", "repeated random tokens"]
    assert panels[0].get_xlim() == panels[1].get_xlim()
    assert [patch.get_width() for patch in panels[0].patches] == [1.0, 2.0, 3.0, 4.0]


def test_strips_have_a_layer_each(made):
    panels = made.plot("layers").axes
    assert [len(panel.images) for panel in panels] == [4, 4, 3, 3]
    assert panels[0].images[1].get_array().tolist() == [[2.0, 2.0]]


def test_pictures_that_cannot_be_drawn_are_refused(made):
    with pytest.raises(ValueError, match="what must be"):
        made.plot("triangle")
    with pytest.raises(ValueError, match="this study has no encoders"):
        made.plot(of="encoders")
    whole = Abilities(
        models=made.models, abilities=made.abilities, rows=[row for row in made.rows if row["layer"] is None]
    )
    assert len(Abilities.joined(whole, made).plot("layers").axes) == 4
    with pytest.raises(ValueError, match="use --by layer for layers"):
        whole.plot("layers")
