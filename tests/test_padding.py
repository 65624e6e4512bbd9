"""What an analysis says of sequences does not depend on how they are batched: padded left, right, or not at all.

Every model that takes tokens and a mask, in float64, on the same sequences: alone, and in batches.
"""

import pytest
import torch
import transformers
from torch import nn

import keyquery as kq
from keyquery.checkpoints.family import families
from keyquery.intervene.rewrites import sites_of
from keyquery.listening.maps import attention_maps
from keyquery.proof.families import tiny_model
from tests.listening.models import full_precision

# Architectures that embed slots: padding before a sequence moves it, unless positions are given. BART's encoder and
# those of whole images take no positions, so that they are padded on the right alone.
GIVEN = {"albert": 0, "bert": 0, "deberta_v2": 0, "distilbert": 0, "electra": 0, "gpt2": 0, "gpt_neo": 0, "roberta": 2}
TEXT = sorted(
    name for name, family in families().items() if family.tiny and family.tiny.get("inputs", "text") == "text"
)
FAST = ("bert", "bloom", "gpt2", "llama")
NAMES = [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in TEXT]
WINDOWS = {"gemma2": 4, "gemma3": 4, "gpt_oss": 4, "mistral": 4}
LENGTHS = (9, 4, 7, 6, 3, 8)
LIMIT = 1e-5
BATCHINGS = {"right": (6, False), "left": (6, True), "threes on the left": (3, True), "threes on the right": (3, False)}


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    full_precision(monkeypatch)


@pytest.fixture
def in_double(monkeypatch):
    """Scores are analysed in float32, which suffices; here what is left of differences is to be seen."""
    single = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x))


def made(name):
    """A tiny model with a head for tokens."""
    base = families()[name].tiny["model"].removesuffix("TextModel").removesuffix("Model")
    heads = (f"{base}ForCausalLM", f"{base}LMHeadModel", f"{base}ForMaskedLM")
    window = {"sliding_window": WINDOWS[name]} if name in WINDOWS else {}
    model = tiny_model(name, model=next(head for head in heads if hasattr(transformers, head)), **window)
    return model if name == "gpt_oss" else model.double()  # whose experts know no float64


def sequences(lengths=LENGTHS):
    return [torch.randint(3, 60, (length,)) for length in lengths]


def batches(name, tokens, size, left=False):
    """Sequences in batches of a size, each padded to its longest; tokens that are padding are arbitrary."""
    out = []
    for start in range(0, len(tokens), size):
        rows = tokens[start : start + size]
        width = max(map(len, rows))

        def padded(row, value=0, width=width):
            return nn.functional.pad(row, (width - len(row), 0) if left else (0, width - len(row)), value=value)

        batch = {
            "input_ids": torch.stack([padded(row, 5) for row in rows]),
            "attention_mask": torch.stack([padded(torch.ones_like(row)) for row in rows]),
        }
        if name in GIVEN:
            batch["position_ids"] = torch.stack([padded(torch.arange(len(row)) + GIVEN[name]) for row in rows])
        out.append(batch)
    return out


def numbers(values):
    """All numbers in nested lists and dicts, with their paths."""
    if isinstance(values, dict):
        return {f"{key}.{path}": number for key in values for path, number in numbers(values[key]).items()}
    if isinstance(values, (list, tuple)):
        return {f"{key}.{path}": number for key, part in enumerate(values) for path, number in numbers(part).items()}
    return {"": float(values)} if isinstance(values, (int, float)) else {}


def assert_alike(given, expected, least=1, single=False):
    given, expected = numbers(given), numbers(expected)
    assert given.keys() == expected.keys()
    assert len(given) >= least
    for path, number in given.items():
        limit = 20 * LIMIT if single and "effective_rank" in path else LIMIT  # entropies of values near 0
        assert number == pytest.approx(expected[path], abs=limit, rel=limit), path


@pytest.mark.parametrize("name", NAMES)
def test_looks(name, in_double):
    model, tokens = made(name), sequences()

    def look(size, left=False):
        reading = kq.look(model, inputs=batches(name, tokens, size, left))
        return [head["on_data"] for head in reading.heads]

    alone = look(1)
    assert any(head is not None for head in alone)
    for size, left in BATCHINGS.values():
        assert_alike(look(size, left), alone, least=20, single=name == "gpt_oss")


@pytest.mark.parametrize("name", NAMES)
def test_ablations(name):
    model, tokens = made(name), sequences()
    placed = any(site.placed for site in sites_of(model).values())
    changes = ["symmetric", "only skew + popularity", "position" if placed else "popularity", "zero", "mean"]
    changes += ["uniform", "window 3 + first", "values 2 per channel"]  # RoPE turns stored keys by slot
    head = "0.1" if name == "albert" else "1.1"

    def ablate(size, left=False):
        reading = kq.ablate(model, batches(name, tokens, size, left), heads=head, changes=changes, means="global")
        return {"loss": reading.loss, "rows": list(reading.rows), "sequences": reading.sequences}

    alone = ablate(1)
    assert max(abs(row["change"]) for row in alone["rows"]) > 1e-3
    assert all(row["second"] > 0 for row in alone["rows"])  # for the same labels, however sequences are batched
    for size, left in BATCHINGS.values():
        assert_alike(ablate(size, left), alone, least=12)


@pytest.mark.parametrize("name", NAMES)
def test_dialled_logits(name):
    """With means over data that are batched in the same way."""
    model, tokens = made(name), sequences()
    gains = {"symmetric": 0.5, "skew": 1.5, "popularity": 0.3}
    gains |= {} if name == "deberta_v2" else {"position": 0.8}  # whose terms of positions cannot be scaled

    def logits(size, left=False):
        data = batches(name, tokens, size, left)
        with torch.no_grad(), kq.dial(model, data=data, means="global", **gains):
            return torch.cat([model(**batch).logits[batch["attention_mask"].bool()] for batch in data]).double()

    alone = logits(1)
    with torch.no_grad():
        plain = torch.cat([model(**batch).logits[0] for batch in batches(name, tokens, 1)]).double()
    assert (alone - plain).abs().max() > 1e-2
    for size, left in BATCHINGS.values():
        assert (logits(size, left) - alone).abs().max() <= LIMIT * float(alone.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_attention_maps(name):
    model, tokens = made(name), sequences()

    def maps(size, left=False):
        rows = []
        for batch in batches(name, tokens, size, left):
            real = batch["attention_mask"].bool()
            layers = torch.stack([layer.double() for layer in attention_maps(model, batch)], 1)
            rows += [layer[..., keep, :][..., keep] for layer, keep in zip(layers, real, strict=True)]
        return rows

    alone = maps(1)
    assert all((row.sum(-1) <= 1 + 1e-6).all() and row.std() > 0.01 for row in alone)
    for size, left in BATCHINGS.values():
        for given, expected in zip(maps(size, left), alone, strict=True):
            assert (given - expected).abs().max() <= LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_roles(name):
    model, tokens = made(name), sequences()

    def roles(size, left=False):
        reading = kq.roles(model, inputs=batches(name, tokens, size, left), length=33, sequences=2)
        return [dict(head) for head in reading.heads]

    alone = roles(1)
    for size, left in BATCHINGS.values():
        assert_alike(roles(size, left), alone, least=20)


@pytest.mark.parametrize("name", ["llama", pytest.param("bloom", marks=pytest.mark.slow)])
def test_means_by_position_of_many_sequences(name, in_double):
    """Of at least 32 sequences, half are for the means and half for the parts, and both are divided into folds."""
    model, tokens = made(name), sequences([3 + number % 4 for number in range(40)])
    readings = []
    for size, left in ((1, False), (40, True), (40, False), (7, True)):
        data = batches(name, tokens, size, left)
        look = kq.look(model, inputs=data)
        changes = ["symmetric", "position", "query_only"]
        ablation = kq.ablate(model, data, heads="1.1", changes=changes, means="position")
        rows = [{key: row[key] for key in ("change", "low", "high")} for row in ablation.rows]
        readings.append([[head["on_data"] for head in look.heads], rows, ablation.loss])
    assert any("symmetric" in path for path in numbers(readings[0]))
    for reading in readings[1:]:
        assert_alike(reading, readings[0], least=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_encoder_decoders(name, in_double):
    """Shares of self- and cross-attention; BART, whose encoder embeds slots, is padded on the right alone."""
    model, source, target = tiny_model(name).double(), sequences(), sequences((5, 3, 6, 4, 7, 2))
    readings = []
    for size, left in ((1, False), (6, False), (2, False), *(((6, True),) if name == "t5" else ())):
        encoder, decoder = batches(name, source, size, left), batches(name, target, size)
        data = [
            {**first, **{f"decoder_{key}": value for key, value in second.items()}}
            for first, second in zip(encoder, decoder, strict=True)
        ]
        readings.append([head["on_data"] for head in kq.look(model, inputs=data).heads])
    for reading in readings[1:]:
        assert_alike(reading, readings[0], least=60)


def test_a_sequence_of_one_token_has_no_loss():
    """It is left out, wherever it stands; the others are as without it."""
    model, tokens = made("llama"), sequences()
    options = {"heads": "1.1", "changes": ["zero"], "means": "global"}
    expected = kq.ablate(model, batches("llama", tokens, 6), **options)
    for size, left in ((7, True), (7, False), (1, False)):
        reading = kq.ablate(model, batches("llama", [*tokens[:2], tokens[0][:1], *tokens[2:]], size, left), **options)
        assert reading.loss == pytest.approx(expected.loss, abs=1e-6)
        assert reading.sequences == len(tokens)
        assert reading.rows[0]["change"] == pytest.approx(expected.rows[0]["change"], abs=1e-6)
    with pytest.raises(ValueError, match="at least two tokens") as error:
        kq.ablate(model, batches("llama", [row[:1] for row in tokens], 6), **options)
    assert "\n" not in str(error.value)
