"""Arguments are checked before the model runs, where they can before it is built; and what running it gives."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.data import DIGITS, take
from keyquery.layers import LanguageModel
from keyquery.listening import attention_maps, queries_and_keys
from keyquery.listening.inputs import data
from keyquery.listening.inputs.load import load_tokenizer
from keyquery.listening.parts.on_data import SEQUENCES
from keyquery.proof.families import tiny_model
from tests.instruments.look.conftest import folder_with_tokenizer
from tests.pages.readings import tiny
from tests.processes import refusal

TEXT = {"text": kq.models.TEXT}
# Arguments, the error, and its words: checked without the model.
ALONE = {
    "length": ({**TEXT, "length": 1}, ValueError, "length must be at least 2, got 1"),
    "length of no number": ({"length": "8"}, TypeError, "length must be an integer, got '8'"),
    "tokens": ({**TEXT, "tokens": 1}, ValueError, "tokens must be at least 2, got 1"),
    "sample": ({**TEXT, "sample": -1}, ValueError, "sample must be at least 0, got -1"),
    "directions": ({"directions": -1}, ValueError, "directions must be at least 0, got -1"),
    "workers": ({"workers": 0}, ValueError, "workers must be at least 1, got 0"),
    "name": ({"name": 3}, TypeError, "name must be a string, got 3"),
    "threshold": ({**TEXT, "threshold": float("nan")}, ValueError, "threshold must be finite, got nan"),
    "layers": ({"layers": "0"}, TypeError, "layers must be a sequence of integers, got '0'"),
    "a text that is not there": ({"text": "gone.txt"}, FileNotFoundError, "file not found: gone.txt"),
    "a text that is no path": ({"text": ["a b"]}, TypeError, "text must be the path of a text file, got a list"),
    "text and inputs": ({**TEXT, "inputs": [{}]}, ValueError, "pass either text or inputs, not both"),
    "an input": ({"inputs": [{}, 3]}, TypeError, "inputs must be batches: .* got a int"),
    "a tensor": ({"inputs": torch.ones(2)}, TypeError, "inputs must be batches: .* got a Tensor"),
    "no inputs": ({"inputs": []}, ValueError, "inputs must hold at least one batch"),
    "costs without data": ({"cost": True}, ValueError, "costs are changes of the loss on data"),
    "a dtype of nothing": ({"dtype": "float32"}, ValueError, "dtype is that of the model that runs"),
}
# The same, where the model must be known.
WITH_MODEL = {
    "a layer that is not there": ({"layers": [0, 4]}, ValueError, "there is no layer 4: LanguageModel has layers 0 to"),
    "no layer": ({"layers": []}, ValueError, "no layer is selected"),
    "a text without a tokenizer": ({"tokenizer": None}, ValueError, "text needs a tokenizer"),
    "an argument of nothing": ({"layer": 3}, TypeError, "unexpected keyword argument 'layer'"),
    "a corpus that is none": ({"corpus": "a.txt"}, TypeError, "corpus must be a kq.Cooccurrence, got a str; kq.Cooc"),
}


@pytest.fixture
def model():
    """A model that must not run."""
    live = LanguageModel.load(kq.models.DECODER)
    live.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    return live


@pytest.mark.unchecked  # types are checked by look itself
@pytest.mark.parametrize("case", ALONE)
def test_arguments_are_checked_before_the_model_is_built(case, model, monkeypatch):
    monkeypatch.setattr(data, "load_model", lambda *_: pytest.fail("the model was built"))
    arguments, error, words = ALONE[case]
    for source in (kq.models.DECODER, model):
        with pytest.raises(error, match=words):
            kq.look(source, **{"tokenizer": load_tokenizer(kq.models.DECODER), **arguments})


@pytest.mark.unchecked  # types are checked by look itself
@pytest.mark.parametrize("case", WITH_MODEL)
def test_arguments_are_checked_before_the_model_runs(case, model):
    arguments, error, words = WITH_MODEL[case]
    with pytest.raises(error, match=words):
        kq.look(model, **{**TEXT, "tokenizer": load_tokenizer(kq.models.DECODER), **arguments})


@pytest.mark.unchecked  # types are checked by look itself
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["look", "{model}", "--ids", "{dir}/text.txt"], "expected token ids"),
        (["look", "--text", "{dir}/text.txt", "--corpus", "{dir}/gone.txt"], "file not found"),
        (["look", "--num-heads", "4"], "heads needs a model: name one"),
        (["compare", "{model}", "{dir}/gone", "--text", "{dir}/text.txt"], "is neither a file, nor a folder"),
        (["compare", "{model}", "{dir}/other.json", "--text", "{dir}/text.txt"], "not a look"),
    ],
)
def test_the_command_line_checks_before_the_model_is_built(arguments, words, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "load_model", lambda *_: pytest.fail("the model was built"))
    (tmp_path / "text.txt").write_text("some words of a text")
    kq.Reading().to_json(tmp_path / "other.json")
    assert words in refusal(*(argument.format(dir=tmp_path, model=kq.models.DECODER) for argument in arguments))


# On data


def assert_whole(head, parts=PARTS):
    assert sum(head["on_data"][name] for name in (*parts, "interaction")) == pytest.approx(1)


def test_on_data_an_encoder_has_no_position_share(encoder):
    path, text = encoder
    reading = kq.look(path, text=text)
    for head in reading.heads:
        assert_whole(head)
        assert head["on_data"]["position"] == pytest.approx(0, abs=1e-9)
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


def test_a_rotary_decoder_has_a_position_share_and_curves_over_offsets(decoder):
    path, text = decoder
    reading = kq.look(path, text=text, length=8)
    for head in reading.heads:
        assert_whole(head)
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
            assert_whole(head, ("pairwise", *PARTS[2:]))
            assert head["label"] in ("pairwise", "popularity", "position", "sink", "mixed", "undecided")
    assert any(head["on_data"] and head["on_data"]["position"] > 0 for head in reading.heads)


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


# The sample

FAMILIES = ("bert", "albert", "gpt2", "llama", "bloom", "t5", "gptj")


def matrices(head, causal):
    """Sum of the parts (n, n), the most that rounding can have moved it, and the softmax over visible keys."""
    parts = [torch.tensor(head["scores"][part], dtype=torch.float64) for part in PARTS]
    moved = 0.5 * 10.0 ** (1 - DIGITS) * sum(part.abs() for part in parts)
    total = sum(parts)
    hidden = torch.ones_like(total).triu(1).bool() & causal
    return total, moved, total.masked_fill(hidden, -torch.inf).softmax(-1)


@pytest.mark.parametrize("name", FAMILIES)  # albert's layers share a block, which sees the tokens several times
@pytest.mark.few(4)
def test_the_softmax_of_the_sum_is_the_attention_of_the_model(name):
    model, batch, reading = tiny(name, sample=7)
    first = {key: value[:1, :7] for key, value in batch.items()}
    maps = list(attention_maps(model, first))
    if name == "t5":
        maps = list(model(**first, output_attentions=True).encoder_attentions)
    assert len(reading.sample["tokens"]) == 7
    causal = {layer["layer"]: layer["causal"] for layer in reading.layers}
    for head in reading.heads:
        if head["layer"] >= len(maps):  # of a decoder, whose maps are others
            continue
        expected = maps[head["layer"]][0, head["head"]].double()
        _, moved, given = matrices(head, causal[head["layer"]])
        allowed = given * (2 * moved.amax(-1, keepdim=True)).expm1() + 1e-6
        assert ((given - expected).abs() <= allowed).all(), head["name"]
        assert (given - expected).abs().max() < 0.05


@pytest.mark.parametrize("rows", [3, SEQUENCES])
@pytest.mark.parametrize("name", ["bert", "llama", "bloom"])
@pytest.mark.few(2)
def test_parts_are_those_of_the_definition(name, rows):
    """Token by token, each vector rotated to its own place; means by position where there are enough sequences."""
    model, batch, reading = tiny(name, rows=rows, length=6, sample=6)
    heads = kq.read(model)
    layer = heads[1]
    each = [{k: v[row : row + 1] for k, v in batch.items()} for row in range(rows)]
    projected = [queries_and_keys(model, one, heads)[1] for one in each]
    query, key = (torch.stack([one[side][2] for one in projected]).double() for side in (0, 1))  # (rows, n, r)
    if rows == 3:
        means = [x.mean((0, 1)).expand(6, -1) for x in (query, key)]
    else:  # means are of every other sequence
        means = [x[0::2].mean(0) for x in (query, key)]
    turn = (lambda t, place: t) if layer.rope is None else (lambda t, place: layer.rope.rotate(t, float(place)))
    scores = next(cell["scores"] for cell in reading.heads if (cell["layer"], cell["head"]) == (1, 2))
    for i in range(6):
        for j in range(6):
            own = [(x[0, i] - mean[i], x[0, j] - mean[j]) for x, mean in zip((query, key), means, strict=True)]
            (q_i, q_j), (k_i, k_j) = own
            bias = heads.position_bias(layer, torch.tensor([j - i]))
            between = lambda q, k: layer.scale * float(turn(q, i) @ turn(k, j))  # noqa: B023, E731
            expected = {
                "symmetric": (between(q_i, k_j) + between(q_j, k_i)) / 2,
                "skew": (between(q_i, k_j) - between(q_j, k_i)) / 2,
                "popularity": between(means[0][i], k_j),
                "query_only": between(q_i, means[1][j]),
                "position": between(means[0][i], means[1][j]) + (0.0 if bias is None else float(bias[2, 0])),
            }
            for part, value in expected.items():
                assert scores[part][i][j] == pytest.approx(value, rel=1e-3, abs=2e-5), part


def test_tokens_are_texts_with_a_tokenizer_and_numbers_without():
    class Letters:
        def decode(self, ids):
            return "\ufffd" if ids[0] == 5 else "abcdefgh"[ids[0] % 8]

    model, heads = tiny_model("bert"), kq.read(tiny_model("bert"))
    batch = {"input_ids": torch.tensor([[3, 5, 6, 7]])}
    assert take(model, [batch], heads, 3).facts == {"tokens": ["#3", "#5", "#6"]}
    assert take(model, [batch], heads, 9, Letters()).facts["tokens"] == ["d", "#5", "g", "h"]
    # The first sequence of at least two tokens, without padding.
    ids = torch.tensor([[9, 0, 0, 0], [0, 11, 12, 13]])
    mask = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 1]])
    batches = [{"input_ids": ids, "attention_mask": mask}]
    assert take(model, batches, heads, 24).facts["tokens"] == ["#11", "#12", "#13"]


def test_without_a_sample_or_token_ids_there_are_no_scores():
    _, _, reading = tiny("bert", sample=0)
    assert reading.sample is None
    assert "scores" not in reading.heads[0]
    inputs = [{"query": torch.randn(2, 5, 8), "key": torch.randn(2, 5, 8), "value": torch.randn(2, 5, 8)}]
    seen = kq.look(torch.nn.MultiheadAttention(8, 2, batch_first=True), inputs=inputs, sample=4)
    assert seen.sample is None
    assert "scores" not in seen.heads[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [("gemma2", "caps its scores"), ("gpt_oss", "sink"), ("deepseek", "nope and rope"), ("modernbert", "window")],
)
@pytest.mark.few(2)
def test_what_else_a_model_does_to_its_scores_is_said(name, words):
    _, _, reading = tiny(name, sample=9)
    assert any(words in note for note in reading.sample["notes"])
    assert "notes" not in tiny("llama", sample=9)[2].sample
