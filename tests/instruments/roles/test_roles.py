"""Roles of hand-built heads are theirs, scores are explicit sums over the model's own maps, and names keep the rule."""

import weakref

import pytest
import torch

import keyquery as kq
from keyquery.instruments.roles.measure import ScoredLayer, copied, layers_read, measure
from keyquery.instruments.roles.naming import estimate, named
from keyquery.instruments.roles.patterns import Patterns, Scores, alignment, keys_of
from keyquery.listening import attention_maps
from keyquery.listening.call import Call
from keyquery.listening.inputs.batches import with_decoder_ids
from keyquery.proof.families import tiny_inputs, tiny_model

pytest.importorskip("transformers")

from tests.instruments.plain import GPT, ViT
from tests.instruments.roles.circuit import built, by_hand
from tests.processes import run


@pytest.fixture(scope="module")
def circuit():
    return kq.roles(built(), sequences=16, length=40)


def head(reading, layer, number):
    return next(row for row in reading.heads if (row["layer"], row["head"]) == (layer, number))


def test_hand_built_heads_have_their_roles_with_score_one_and_uniform_heads_none(circuit):
    built_for = {"0.0": "previous_token", "0.2": "duplicate_token", "0.3": "sink", "1.0": "induction"}
    for row in circuit.heads:
        role = built_for.get(f"{row['layer']}.{row['head']}")
        assert row["role"] == role
        if role is not None:
            assert row["scores"][role]["random"]["score"] == pytest.approx(1.0, abs=1e-4)
    assert head(circuit, 0, 0)["roles"] == ["previous_token", "local"]
    assert head(circuit, 1, 0)["scores"]["retrieval"]["needle"]["score"] == pytest.approx(1.0, abs=1e-4)
    assert "retrieval" in head(circuit, 1, 0)["roles"]
    assert circuit.provenance["needle_accuracy"] == 1.0
    assert circuit.ranking("induction")[0][0] == "1.0"
    for role, of_role in head(circuit, 0, 1)["scores"].items():  # attention is uniform, at its null level
        if role != "retrieval":  # the most attended of equal keys is one of them
            assert of_role["random"]["score"] == pytest.approx(of_role["random"]["null"], abs=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "gpt_oss", "t5"])
def test_scores_are_explicit_sums_over_the_models_own_maps(name):
    model = tiny_model(name)
    batch = {"input_ids": torch.randint(3, 12, (2, 14))}  # few ids, so that many come again
    if name == "t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    places = [place for place in layers_read(kq.read(model)) if place.kind == "self" and "decoder" not in place.name]
    measured = measure(model, [batch], places, window=3)
    maps = attention_maps(model, batch)
    roles = {role for _, _, role in measured}
    assert roles >= {"previous_token", "local", "sink", "duplicate_token"}
    assert ("induction" in roles) == places[0].causal != ("next_token" in roles)
    for place, of_layer in zip(places, maps, strict=True):
        for row in range(2):
            for number in range(place.heads):
                own = of_layer[row, number, :, :14].tolist()
                seen = [[value > 0 for value in line] for line in own]
                for role in {role for at, _, role in measured if at == place.index}:
                    expected = by_hand(role, own, batch["input_ids"][row].tolist(), seen, window=3)
                    score, null = (values[row] for values in measured[place.index, number, role])
                    if expected is None:
                        assert torch.isnan(score)
                    else:
                        assert (score, null) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("name", "width"), [("llama", (4, 0)), ("llama", (0, 4)), ("bloom", (4, 0)), ("bart", (0, 4))])
def test_padding_counts_neither_as_query_nor_as_key(name, width):
    """Of encoder-decoders, too; tests/test_padding.py has all architectures."""
    model, ids = tiny_model(name), torch.randint(3, 9, (1, 9))
    pad = torch.nn.functional.pad
    short = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    padded = {"input_ids": pad(ids, width, value=5), "attention_mask": pad(short["attention_mask"], width)}
    batches = with_decoder_ids([short, padded]) if name == "bart" else [short, padded]
    layers = layers_read(kq.read(model))
    alone, beside = (measure(model, [batch], layers, window=3) for batch in batches)
    assert ("alignment" in {role for _, _, role in alone}) == (name == "bart")
    for key, scores in alone.items():
        assert torch.allclose(torch.stack(scores), torch.stack(beside[key]), atol=1e-5), key


def test_long_sequences_are_run_in_smaller_parts_with_the_same_scores():
    model, ids = tiny_model("gpt2", n_positions=300), torch.randint(3, 60, (5, 256))
    places = layers_read(kq.read(model))
    whole = measure(model, [{"input_ids": ids}], places, window=8)
    single = measure(model, [{"input_ids": row[None]} for row in ids], places, window=8)
    for key, scores in whole.items():
        assert torch.allclose(torch.stack(scores), torch.stack(single[key]), atol=1e-5)


def test_an_encoder_attends_to_its_last_special_token_as_to_a_sink():
    ends = torch.tensor([[0, 3]])
    keys = keys_of("sink", 4, None, 8, ends)
    seen = torch.ones(1, 4, 4, dtype=torch.bool)
    maps = torch.tensor([0.5, 0.1, 0.1, 0.3]).expand(1, 1, 4, 4)
    assert Patterns({"sink": keys}, seen).of(maps)["sink"].score.item() == pytest.approx(0.8)


def test_alignment_is_the_sum_over_pairs_of_queries_and_keys():
    maps = torch.rand(2, 3, 5, 7).softmax(-1)
    queries = torch.tensor([[True] * 5, [True, True, True, False, True]])
    score, null = alignment(maps, queries, torch.Generator().manual_seed(0))
    for row in range(2):
        kept = [i for i in range(5) if queries[row, i]]
        for number in range(3):
            pairs = [(i, later) for i in kept for later in kept if i < later]
            total = sum(
                float(maps[row, number, i, j] * maps[row, number, later, k]) * ((k > j) - (k < j))
                for i, later in pairs
                for j in range(7)
                for k in range(7)
            )
            assert score[row, number].item() == pytest.approx(total / len(pairs), abs=1e-6)
    assert (null.abs() <= 1).all()
    diagonal = torch.eye(6)
    maps = torch.stack((diagonal, diagonal.flip(0), torch.full((6, 6), 1 / 6)))[None]
    score, null = alignment(maps, torch.ones(1, 6, dtype=torch.bool), torch.Generator().manual_seed(0))
    assert score[0].tolist() == pytest.approx([1, -1, 0], abs=1e-9)
    assert null[0, 0] > 0.3  # of 720 orders of six queries, some are nearly forward
    assert null[0, 2] == pytest.approx(0)


def test_a_needle_is_copied_only_where_the_model_predicts_it():
    targets, top = torch.tensor([[4, 5, 6]] * 2), torch.tensor([[4, 4, 6]] * 2)
    answered = torch.tensor([[True, True, False], [True, False, False]])  # the second is not answered
    score, null = copied(top, targets, answered, torch.tensor([8, 9, 10]))
    assert score[0].item() == pytest.approx(1 / 3)
    assert null[0].item() == pytest.approx(max((1 / 8 + 1 / 9) / 3, (0 + 1 / 2 + 0) / 3))
    assert score[1].isnan()
    assert null[1].isnan()


def test_cross_attention_is_scored_by_alignment_and_the_model_takes_inputs():
    model = tiny_model("whisper")
    batches = [tiny_inputs("whisper", model) for _ in range(3)]
    reading = kq.roles(model, inputs=batches)
    kinds = {row["kind"]: sorted(row["scores"]) for row in reading.heads}
    assert kinds["cross"] == ["alignment"]
    assert "alignment" not in kinds["self"]
    assert reading.provenance["data"] == ["inputs"]
    with pytest.raises(ValueError, match="WhisperModel takes input_features, not token ids: pass inputs"):
        kq.roles(model)


def test_the_interval_is_students_and_names_are_corrected_for_the_number_of_tests():
    stats = pytest.importorskip("scipy.stats")
    score = 0.3 + 0.02 * torch.randn(20, dtype=torch.float64)
    excess = score - 0.28
    row = estimate(Scores(score, torch.full_like(score, 0.28)), tests=1000)
    low, high = stats.t.interval(0.95, 19, score.mean().item(), stats.sem(score.numpy()))
    assert (row["low"], row["high"]) == pytest.approx((low, high), rel=1e-4)
    for tests in (1, 5, 50, 1000, 100_000):
        p = stats.ttest_1samp(excess.numpy(), 0).pvalue
        assert estimate(Scores(score, score - excess), tests)["clears"] == (excess.mean() > 0 and p < 0.05 / tests)


def test_of_six_hundred_heads_without_a_role_none_is_named_and_a_true_one_is():
    torch.manual_seed(1)
    null = torch.full((16,), 0.2, dtype=torch.float64)
    part = {(0, at, "sink"): Scores(null + 0.1 * torch.randn(16, dtype=torch.float64), null) for at in range(600)}
    part[0, 7, "sink"] = Scores(null + 0.2 + 0.05 * torch.randn(16, dtype=torch.float64), null)
    place = ScoredLayer(0, "attention", "self", True, 600)
    rows = named({"random": part}, [place], least=0.0)
    assert [row["head"] for row in rows if row["role"]] == [7]
    assert sum(estimate(scores, tests=1)["clears"] for scores in part.values()) > 5  # without the correction


def test_few_sequences_name_nothing_and_small_ones_neither():
    sure = Scores(torch.full((7,), 0.5), torch.full((7,), 0.1))
    assert not estimate(sure, 1)["clears"]
    weak = {(0, 0, "sink"): Scores(torch.full((9,), 0.35), torch.full((9,), 0.1))}
    place = ScoredLayer(0, "attention", "self", True, 1)
    assert named({"random": weak}, [place], least=0.3)[0]["roles"] == []
    assert named({"random": weak}, [place], least=0.0)[0]["roles"] == ["sink"]


def test_a_text_is_measured_beside_random_tokens_and_decides_on_positions(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("\n".join("the sea and the sky and the sea again and the sky above it" for _ in range(9)))
    reading = kq.roles(kq.models.DECODER, text, sequences=9, length=40)
    assert reading.provenance["data"] == ["random", "needle", "text"]
    scores = reading.heads[0]["scores"]
    assert set(scores["induction"]) == set(scores["sink"]) == {"random", "text"}
    assert scores["sink"]["text"]["sequences"] == 9
    assert reading == kq.Reading.load(reading.to_json())
    row = reading.records()[0]
    assert row["induction_random"] == scores["induction"]["random"]["score"]
    assert row["sink_text_low"] <= row["sink_text"] <= row["sink_text_high"]


def test_what_is_not_measured_is_said():
    reading = kq.roles(tiny_model("llama"), sequences=2, length=36)
    assert "retrieval" not in reading.heads[0]["scores"]
    assert reading.notes == [
        "retrieval is not measured: LlamaModel has no LM head",
        "random: 2 sequences, and at least 8 are needed to name a role",
    ]
    roles = kq.roles(GPT(context=40).eval())
    assert len(roles.heads) == 8
    assert any("40 a sequence" in note for note in roles.notes)
    small = kq.roles(tiny_model("qwen3", model="Qwen3ForCausalLM"), sequences=2)  # its random tokens come again
    assert small.notes[0] == "retrieval is not measured: needles of 128 different tokens need a larger vocabulary"
    assert {*small.heads[0]["scores"]["induction"]} == {"random"}
    assert small.heads[0]["scores"]["duplicate_token"]["random"]["null"] > 0.02  # several occurrences of each token


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequences": 1}, "sequences must be at least 2, got 1"),
        ({"length": 4}, "length must be at least 5, for two repeats, got 4"),
        ({"length": 20}, "length must be at least 33, for a needle in a haystack, got 20"),
        ({"length": 5000}, "LanguageModel does not run on"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"least": float("nan")}, "least must be finite, got nan"),
        ({"text": "nowhere.txt"}, "nowhere.txt"),
        ({"text": "a.txt", "inputs": {}}, "pass either text or inputs, not both"),
    ],
)
def test_bad_input_is_one_sentence(options, message):
    with pytest.raises((ValueError, OSError), match=message) as caught:
        kq.roles(kq.models.DECODER, **options)
    assert "\n" not in str(caught.value)


def test_a_map_is_dropped_before_the_next_one_is_scored(monkeypatch):
    alive, most = [], []
    weights = Call.weights

    def watched(call, heads=slice(None)):
        maps = weights(call, heads)
        most.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(maps))
        return maps

    monkeypatch.setattr(Call, "weights", watched)
    kq.roles(kq.models.DECODER, sequences=4, length=40)
    assert len(alive) >= 2 * 16  # every head, on random tokens and on needles
    assert max(most) <= 1


@pytest.mark.parametrize("fused", [True, False])
def test_a_model_of_ones_own_needs_no_declaration(fused):
    model = GPT(fused=fused)
    reading = kq.roles(model, sequences=8, length=40)
    assert reading.model == {"name": "GPT", "layers": 2, "heads": 8}
    assert reading.heads[-1]["name"] == "h.1.attn.3"
    assert sorted(reading.heads[0]["scores"]) == ["duplicate_token", "induction", "local", "previous_token", "sink"]
    assert reading.provenance["data"] == ["random", "needle"]
    idx = torch.randint(60, (9, 20))
    measured = kq.roles(model, inputs=[{"idx": idx}], length=40)
    assert measured.provenance["data"] == ["random", "needle", "inputs"]
    maps = attention_maps(model, {"idx": idx})[1][:, 3]
    ones = maps.diagonal(-1, 1, 2).double()
    # A query's only visible keys are not counted.
    assert head(measured, 1, 3)["scores"]["previous_token"]["inputs"]["score"] == pytest.approx(
        ones.mean().item(), abs=1e-6
    )


def test_a_text_of_unequal_lines_needs_no_mask(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("\n".join("the sea and the sky" + " again" * (number % 3) for number in range(9)))

    class Words:
        pad_token_id = None

        def __call__(self, line):
            return {"input_ids": [len(word) for word in line.split()]}

    reading = kq.roles(GPT(), text, tokenizer=Words(), sequences=9, length=36)
    assert reading.heads[0]["scores"]["sink"]["text"]["sequences"] == 9


def test_models_without_tokens_are_measured_on_inputs():
    vit = kq.roles(ViT(), inputs={"x": torch.randn(9, 3, 16, 16)})
    assert sorted(vit.heads[0]["scores"]) == ["local", "next_token", "previous_token", "sink"]
    assert vit.notes == ["random tokens are not measured: the inputs have x, not token ids alone"]
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, batch_first=True), 2)
    causal = torch.ones(10, 10, dtype=torch.bool).triu(1)
    reading = kq.roles(encoder, inputs={"src": torch.randn(9, 10, 16), "mask": causal})
    assert sorted(reading.heads[0]["scores"]) == ["local", "previous_token", "sink"]  # its mask is causal
    with pytest.raises(ValueError, match="TransformerEncoder takes other inputs, not token ids: pass inputs"):
        kq.roles(encoder)
    with pytest.raises(ValueError, match="Linear ran without an attention call that torch shows"):
        kq.roles(torch.nn.Linear(8, 2), inputs={"input": torch.randn(1, 4, 8)})


def test_a_dialled_model_is_refused():
    model = tiny_model("llama")
    with kq.dial(model, skew=0), pytest.raises(ValueError, match="already dialled or projected: undo that first"):
        kq.roles(model, sequences=2, length=36)


def test_a_look_has_the_roles_of_roles_itself():
    look = kq.look(kq.models.DECODER, layers=[2, 3], roles=True, length=33)
    own = kq.roles(kq.models.DECODER, length=33)
    assert own.heads == kq.roles(kq.models.DECODER, length=33).heads  # by the same seed
    by_place = {(row["layer"], row["head"]): row for row in own.heads}
    assert {head["layer"] for head in look.heads} == {2, 3}
    for head in look.heads:
        row = by_place[head["layer"], head["head"]]
        assert head["roles"] == {key: row[key] for key in ("role", "roles", "scores")}
        assert head["on_data"] is None
    assert look.provenance["roles"]["data"] == ["random", "needle"]
    assert kq.Reading.load(look.to_json()) == look


def test_the_command_line_writes_all_files(tmp_path):
    files = {name: tmp_path / f"roles.{name}" for name in ("json", "csv", "html")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    small = ["--sequences", 8, "--length", 40, "--least", 0.2]
    assert "previous-token" in run("roles", kq.models.DECODER, *small, *options)
    reading = kq.Reading.load(files["json"])
    assert reading.provenance["least"] == 0.2
    head, *lines = files["csv"].read_text().splitlines()
    assert "induction_random_null" in head
    assert len(lines) == len(reading.heads) == 16
    assert files["html"].read_text().startswith("<!doctype html>")
