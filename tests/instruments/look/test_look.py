"""`look` from a checkpoint or a saved estimator to the reading, the terminal and the files."""

import csv
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.forms.parts import PARTS

run = CliRunner().invoke
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "it", "was", "warm", "under", "old", "stone", "by", "my", "bed"]
NOISE = torch.randn(40, 6, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def small():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True) for _ in range(2)]
    return nn.Sequential(*blocks)


def folder_with_tokenizer(path, name):
    """A tiny model with a tokenizer of whole words beside it, as a user has it on disk."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    from keyquery.proof.families import tiny_model

    tiny_model(name).save_pretrained(path)
    words = {"[PAD]": 0, "[UNK]": 1, **{word: i + 2 for i, word in enumerate(WORDS)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(path)
    text = path / "text.txt"
    text.write_text("\n".join(" ".join(WORDS[i : i + 9]) for i in range(9)))
    return path, text


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return folder_with_tokenizer(tmp_path_factory.mktemp("bert"), "bert")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return folder_with_tokenizer(tmp_path_factory.mktemp("llama"), "llama")


# The reading


def test_metrics_equal_dense_algebra(small):
    reading, layer = kq.look(small, name="small"), kq.read(small)[1]
    dense = layer.form.query.double().mT @ layer.form.key.double()
    M, whole = dense[1], dense.sum(0)
    raw = reading.heads[3]["raw"]
    assert raw["symmetry"] == pytest.approx(float((M * M.mT).sum() / M.norm() ** 2))
    assert raw["symmetric_energy"] + raw["skew_energy"] == pytest.approx(float(M.norm() ** 2))
    assert raw["singular_values"] == pytest.approx(torch.linalg.svdvals(M)[:16].tolist())
    assert raw["column_directionality"] == pytest.approx(float(layer.form[1].column_directionality()))
    expected = float((whole * whole.mT).sum() / whole.norm() ** 2)
    assert reading.layers[1]["raw"]["symmetry"] == pytest.approx(expected, abs=1e-6)
    together = kq.Form(torch.eye(32, dtype=torch.float64), whole)
    outliers = float(together.column_directionality())
    assert reading.layers[1]["raw"]["column_directionality"] == pytest.approx(outliers, abs=1e-4)
    assert kq.Reading.load(reading.to_json()) == reading
    frame = reading.to_frame()
    assert frame["raw_symmetry"].tolist() == [head["raw"]["symmetry"] for head in reading.heads]
    assert {"layer", "head", "kind", "rank", "folded_effective_rank", "label", "evidence"} <= set(frame.columns)


def test_views_are_those_of_the_layer(encoder):
    path, _ = encoder
    reading = kq.look(path)
    layer = kq.read(path)[1]
    for view, form in (("raw", layer.form), ("folded", layer.folded)):
        given = [head[view]["symmetry"] for head in reading.heads if head["layer"] == 1]
        assert given == pytest.approx(form.symmetry.tolist())
    assert all(head["on_data"] is None for head in reading.heads)
    assert kq.look(path, layers=[1]).heads == [head for head in reading.heads if head["layer"] == 1]


def test_on_data_an_encoder_has_no_position_share(encoder):
    path, text = encoder
    reading = kq.look(path, text=text)
    for head in reading.heads:
        data = head["on_data"]
        assert sum(data[name] for name in (*PARTS, "interaction")) == pytest.approx(1)
        assert data["position"] == pytest.approx(0, abs=1e-9)
    # Eight lines of nine words and one of eight: Σn²/Σn = 8.9. Nine lines are too few for means by position.
    facts = reading.provenance["data"]
    assert "9 sequences are too few for means by position, which need 32" in facts.pop("note")
    expected = {"tokens": 80, "sequences": 9, "length": 9, "longest": 128, "from": "text.txt"}
    assert facts == {**expected, "means": "over all positions"}


def test_offsets_on_data_are_those_of_what_was_run(decoder):
    path, text = decoder
    given, expected, long = (
        [head["on_data"]["position"] for head in kq.look(path, text=text, length=length).heads]
        for length in (128, 9, 4)
    )
    assert given == pytest.approx(expected)
    assert given != pytest.approx(long, rel=0.01)
    assert kq.look(path, text=text, tokens=20).provenance["data"]["tokens"] == 20


def test_metrics_follow_the_heads_that_they_are_of():
    """Exchanged heads of one layer exchange all their metrics, and change nothing of another layer."""
    torch.manual_seed(0)
    model, other = (kq.Encoder(16, depth=2, heads=2).eval() for _ in range(2))
    order = torch.arange(16).roll(8)
    weights = model.state_dict()
    for name in ("query", "key", "value"):
        weights[f"blocks.1.attention.{name}.weight"] = weights[f"blocks.1.attention.{name}.weight"][order]
        if (bias := f"blocks.1.attention.{name}.bias") in weights:
            weights[bias] = weights[bias][order]
    weights["blocks.1.attention.output.weight"] = weights["blocks.1.attention.output.weight"][:, order]
    other.load_state_dict(weights)
    one, turned = (kq.look(each, inputs={"x": torch.ones(40, 6, 16).cumsum(1) % 3 + NOISE}) for each in (model, other))
    for head, to in zip(one.heads, (0, 1, 3, 2), strict=True):
        for view in ("raw", "folded", "on_data"):
            expected = {key: x for key, x in head[view].items() if isinstance(x, float)}
            assert {key: turned.heads[to][view][key] for key in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_model_that_takes_no_text_says_what_it_takes(tmp_path):
    path, text = folder_with_tokenizer(tmp_path, "vit")
    with pytest.raises(ValueError, match="ViTModel takes pixel_values, not text"):
        kq.look(path, text=text)


def test_a_model_with_weights_missing_is_not_run_unless_they_are_its_poolers(tmp_path):
    """transformers would fill them with noise and say nothing."""
    path, text = folder_with_tokenizer(tmp_path, "bert")
    tensors = {name: x for name, x in load_file(path / "model.safetensors").items() if "pooler" not in name}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert kq.look(path, text=text).heads[0]["on_data"] is not None
    missing = "encoder.layer.1.output.dense.weight"
    del tensors[missing]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"cannot be run: missing weights {missing}".replace(".", r"\.")):
        kq.look(path, text=text)


def test_on_data_a_rotary_decoder_minds_the_place(decoder):
    path, text = decoder
    reading = kq.look(path, text=text, length=8)
    for head in reading.heads:
        assert sum(head["on_data"][name] for name in (*PARTS, "interaction")) == pytest.approx(1)
        assert head["on_data"]["position"] > 0
        assert head["raw"]["offsets"]["contents"][0] == pytest.approx(head["raw"]["symmetry"])
        assert head["raw"]["offsets"]["offset"][:3] == [0, -1, -2]
    whole = kq.read(path)[0].form.dense().double().sum((0, 1))  # queries that share a key, then the layer
    expected = float((whole * whole.mT).sum() / whole.norm() ** 2)
    assert reading.layers[0]["raw"]["symmetry"] == pytest.approx(expected, abs=1e-5)


def test_an_encoder_and_decoder_runs_on_text(tmp_path):
    path, text = folder_with_tokenizer(tmp_path, "t5")
    reading = kq.look(path, text=text, length=8)
    parts = {head["kind"]: "symmetric" in head["on_data"] for head in reading.heads}
    assert parts == {"self": True, "cross": False}  # contents of two sequences cannot be swapped
    for head in reading.heads:
        if head["kind"] == "cross":
            names = ("pairwise", "popularity", "query_only", "position", "interaction")
            assert sum(head["on_data"][name] for name in names) == pytest.approx(1)
            assert head["label"] in ("pairwise", "popularity", "position", "sink", "mixed", "undecided")
    assert any(head["on_data"] and head["on_data"]["position"] > 0 for head in reading.heads)


def test_directions_are_told_by_their_tokens(encoder):
    path, _ = encoder
    head = kq.look(path, layers=[1], directions=2).heads[2]
    layer, embedding = kq.read(path)[1], kq.read(path).embedding()
    rows = embedding - embedding.mean(0)
    rows = rows / rows.norm(dim=1, keepdim=True)
    S = layer.form.symmetric.dense()[2].double()
    values, vectors = torch.linalg.eigh(S)
    top = vectors[:, values.abs().argmax()].float()
    along = rows @ top
    words = ["[PAD]", "[UNK]", *WORDS]
    names = [words[i] if i < len(words) else f"#{i}" for i in range(len(rows))]
    both = {frozenset(head["objects"][0][end]) for end in ("tokens", "opposite")}
    assert both == {frozenset(names[i] for i in (sign * along).topk(5).indices) for sign in (1, -1)}
    assert head["objects"][0]["value"] == pytest.approx(float(values[values.abs().argmax()]), rel=1e-4)
    planes = layer.form[2].skew_planes(1)
    A = planes.values[0] * (planes.source @ planes.target.mT - planes.target @ planes.source.mT)
    scores = rows.double() @ A @ rows.double().mT
    strongest = scores.flatten().argmax()
    assert head["relations"][0]["pairs"][0] == [names[strongest // len(rows)], names[strongest % len(rows)]]


# Files of estimators

KINDS = {"series": kq.SeriesClassifier, "events": kq.EventModel, "rows": kq.NPTClassifier}
TINY = {"heads": 2, "device": "cpu", "random_state": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One saved estimator of each kind, trained for a step or two."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("estimators")
    series = kq.SeriesClassifier(width=8, depth=1, epochs=1, **TINY)
    series.fit(random.normal(size=(6, 5, 2)), list("aabbab"))
    events = kq.EventModel(width=8, window=3, epochs=1, **TINY)
    events.fit(list("abcabcabcabc"), np.arange(12.0) + random.random(12) / 2, [0] * 6 + [1] * 6)
    rows = kq.NPTClassifier(embedding=8, depth=1, steps=2, **TINY)
    rows.fit(random.normal(size=(12, 2)), list("aabbab") * 2)
    for name, estimator in {"series": series, "events": events, "rows": rows}.items():
        estimator.save(folder / f"{name}.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["events", "rows"])
def test_python_and_the_command_line_look_at_the_same_estimator(kind, files, tmp_path):
    path, written = files / f"{kind}.safetensors", tmp_path / "look.json"
    reading, estimator = kq.look(path), KINDS[kind].load(path)
    done = run(cli.app, ["look", str(path), "--json", str(written), "--quiet"])
    assert done.exit_code == 0, done.output
    assert reading.model == kq.Reading.load(written).model
    assert reading.heads == kq.look(estimator).heads == kq.look(estimator.network_).heads
    assert reading.model["name"] == f"{kind}.safetensors"
    assert not kq.compare(path, estimator).changes[0]["rows"][0]["change"]
    with pytest.raises(ValueError, match=rf"heads is not for .*{kind}\.safetensors, which an estimator has saved"):
        kq.look(path, heads=2)


@pytest.mark.parametrize("kind", KINDS)
def test_estimators_whose_weights_are_no_numbers_are_refused(kind, files, tmp_path):
    path = files / f"{kind}.safetensors"
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    tensors, path = load_file(path), tmp_path / "a.safetensors"
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel())
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, path, facts)
    with pytest.raises(ValueError, match=r"is not a complete \w+ file: .*(NaN or infinity|times that do not decrease)"):
        kq.look(path)


# The command line


def test_command_line_shows_every_head(tmp_path):
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv"), "--force"]
    (tmp_path / "a.json").write_text("old")
    result = run(cli.app, ["look", str(kq.models.DECODER), *files])
    assert result.exit_code == 0, result.output
    assert all(f"{layer}.{head} " in result.output for layer in range(4) for head in range(4))
    assert max(map(len, result.output.splitlines())) <= 100
    data = json.loads((tmp_path / "a.json").read_text())
    with open(tmp_path / "a.csv") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[5]["raw_symmetry"]) == data["heads"][5]["raw"]["symmetry"]


def test_command_line_on_data(decoder, tmp_path):
    path, text = decoder
    out = tmp_path / "out.json"
    arguments = ["look", str(path), "--text", str(text), "--layers", "1", "--length", "8", "--json", str(out)]
    result = run(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "bars: shares of score variance" in result.output
    assert "8-token windows" in result.output
    assert "Labels: " in result.output
    assert {head["layer"] for head in json.loads(out.read_text())["heads"]} == {1}
    assert max(map(len, result.output.splitlines())) <= 100


@pytest.mark.slow
def test_without_a_model_the_two_that_ship_stand_side_by_side(tmp_path):
    out = tmp_path / "out.json"
    result = run(cli.app, ["look", "--tokens", "6000", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "encoder" in result.output
    assert "decoder" in result.output
    encoder, decoder = json.loads(out.read_text())["readings"]
    deep = [head["on_data"]["symmetric"] for head in encoder["heads"] if head["layer"] > 0]
    assert min(deep) > 0.4
    assert sum(head["on_data"]["position"] > 0.5 for head in decoder["heads"]) >= 10
    assert encoder["provenance"]["data"]["longest"] == decoder["provenance"]["data"]["longest"] == 128  # the default


def test_a_decoder_of_learned_positions_looks_by_position():
    """Popularity is what a key's content draws: means by position keep learned positions out of it."""
    batches = [
        {"input_ids": torch.randint(300, 4000, (16, 32), generator=torch.Generator().manual_seed(i))} for i in (1, 2)
    ]
    by_position = kq.look(kq.models.DECODER, inputs=batches)
    over_all = kq.look(kq.models.DECODER, inputs=batches[:1])
    assert [one.provenance["data"]["means"] for one in (by_position, over_all)] == ["by position", "over all positions"]
    assert sum(head["on_data"]["position"] > 0.5 for head in by_position.heads) >= 8
    assert all(head["on_data"]["position"] == pytest.approx(0, abs=1e-9) for head in over_all.heads)


@pytest.mark.slow
def test_half_a_window_of_a_causal_model_is_a_window_of_half_the_length():
    ids = torch.randint(300, 4000, (64, 24), generator=torch.Generator().manual_seed(1))
    whole, half = (
        kq.look(kq.models.DECODER, inputs=[{"input_ids": part} for part in ids[:, :n].split(16)]) for n in (24, 12)
    )
    for one, other in zip(whole.heads, half.heads, strict=True):
        for part in PARTS:
            assert one["on_data"]["half_window"][part] == pytest.approx(other["on_data"][part], abs=2e-3)
        signs = one["on_data"]["symmetry"] * one["on_data"]["half_window"]["symmetry"] < 0
        assert ("symmetry" in one["on_data"]["changes_with_window"]) == signs


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [16, 200])
def test_inputs_are_not_cut_and_their_window_is_their_own_length(tokens):
    """Also where no argument of the model is known to hold tokens, as for images."""
    look = kq.look(kq.Decoder(16, depth=1, heads=2).eval(), inputs=[{"x": torch.randn(40, tokens, 16)}])
    data = look.provenance["data"]
    assert (data["length"], data["longest"], data["sequences"]) == (tokens, tokens, 40)
    assert data["tokens"] == 20 * tokens  # half of the sequences; the others give the means


BAD = {
    "an existing file": (["look", "--json", "{dir}/old.json"], "old.json already exists; use --force to replace it"),
    "no such model": (["look", "{dir}/gone"], "is neither a file, nor a folder, nor a hub model"),
    "a broken file": (["look", "{dir}/bad.safetensors"], "is not a readable safetensors file"),
    "no heads": (["look", "{dir}/bare.safetensors"], "it has: give --num-heads"),
    "wrong heads": (["look", "{dir}/bare.safetensors", "--num-heads", "5"], "is not 5 heads of equal width"),
    "layers that are no numbers": (["look", "{dir}/bare.safetensors", "--layers", "a-b"], "--layers takes numbers"),
    "text without a model": (["look", "{dir}/bare.safetensors", "--text", "{dir}/old.json"], "cannot be run"),
    "a comparison with no look": (["compare", "{dir}/other.json", "{dir}/other.json"], "not a look"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(case, tmp_path, monkeypatch, capsys):
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing of the kind, and rather short too")
    save_file({"in_proj_weight": torch.randn(24, 8), "out_proj.weight": torch.eye(8)}, tmp_path / "bare.safetensors")
    kq.Reading().to_json(tmp_path / "other.json")
    before = sorted(path.name for path in tmp_path.iterdir())
    arguments, words = BAD[case]
    monkeypatch.setattr("sys.argv", ["keyquery", *(a.format(dir=tmp_path) for a in arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    _, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert words in err
    assert len(err.splitlines()) == 1, err
    assert (tmp_path / "old.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_model_without_heads_is_refused():
    with pytest.raises(
        ValueError, match=r"Linear has no known attention module: it holds bias, weight; if it has attention"
    ):
        kq.look(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="keys of width 6 beside queries of width 4 have no form"):
        kq.look(nn.MultiheadAttention(4, 2, kdim=6))
