"""Scores on a sample of the data against the attention that the real model computes."""

import pytest
import torch

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.instruments.look.sample import DIGITS, take
from keyquery.listening import attention_maps
from keyquery.listening.parts.on_data import SEQUENCES

FAMILIES = ("bert", "albert", "gpt2", "llama", "bloom", "t5", "gptj")


def looked(name, rows=3, length=9, **options):
    pytest.importorskip("transformers")
    from keyquery.proof.families import tiny_model

    model = tiny_model(name)
    ids = torch.randint(3, 60, (rows, length))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "t5":
        batch["decoder_input_ids"] = ids
    return model, batch, kq.look(model, inputs=[batch], **options)


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
    model, batch, reading = looked(name, sample=7)
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
    from keyquery.listening import queries_and_keys

    model, batch, reading = looked(name, rows=rows, length=6, sample=6)
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

    model, _, _ = looked("bert", rows=1)
    batch = {"input_ids": torch.tensor([[3, 5, 6, 7]])}
    assert take(model, [batch], kq.read(model), 3).facts == {"tokens": ["#3", "#5", "#6"]}
    assert take(model, [batch], kq.read(model), 9, Letters()).facts["tokens"] == ["d", "#5", "g", "h"]
    # The first sequence of at least two tokens, without padding.
    ids = torch.tensor([[9, 0, 0, 0], [0, 11, 12, 13]])
    mask = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 1]])
    batches = [{"input_ids": ids, "attention_mask": mask}]
    assert take(model, batches, kq.read(model), 24).facts["tokens"] == ["#11", "#12", "#13"]


def test_without_a_sample_or_token_ids_there_are_no_scores():
    _, _, reading = looked("bert")
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
    _, _, reading = looked(name, sample=9)
    assert any(words in note for note in reading.sample["notes"])
    assert "notes" not in looked("llama", sample=9)[2].sample
