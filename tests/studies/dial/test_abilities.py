"""Abilities of models whose answers are known: copiers, guessers, uniform attention, hand-made hidden states."""

import math
from types import SimpleNamespace

import pytest
import torch
from keyquery_studies.dial.abilities import (
    accuracy,
    doubles,
    first_token_mass,
    halves,
    hidden_words,
    last_hidden,
    look_ups,
    loss,
    neighbours,
    probe,
    read_out,
    repeated,
    text,
)
from keyquery_studies.dial.sequences import NOTHING, Material, Sequences
from torch import nn

import keyquery as kq
from keyquery.instruments.ablation.losses import next_token_loss
from keyquery.layers import LanguageModel, Shape

SIZE = 64


class Letters:
    """A tokenizer of single characters, ids from 4 on; with [begin] and [end] around a text, as BERT has them."""

    pad_token_id, mask_token_id = 0, 3
    all_special_ids = (0, 1, 2, 3)

    def num_special_tokens_to_add(self):
        return 2

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [4 + ord(letter) % (SIZE - 4) for letter in text]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


def material(causal=True, seed=0, size=2000):
    letters = torch.randint(60, (size,), generator=torch.Generator().manual_seed(seed))
    return Material({"tale": "".join(chr(200 + int(n)) for n in letters)}, Letters(), causal, SIZE)


class Answering(nn.Module):
    """Logits by rule: of each sequence of ids, for each token, the id that comes next."""

    def __init__(self, rule, sure=1000.0):
        super().__init__()
        self.rule, self.sure = rule, nn.Parameter(torch.tensor(sure))

    def forward(self, input_ids):
        answers = torch.tensor([[self.rule(row[: i + 1]) for i in range(len(row))] for row in input_ids.tolist()])
        return SimpleNamespace(logits=self.sure * nn.functional.one_hot(answers, SIZE).float())


def what_followed(ids):
    """The token that stood after the last earlier occurrence of the last token, as an induction head says."""
    earlier = [i for i in range(len(ids) - 1) if ids[i] == ids[-1]]
    return ids[earlier[-1] + 1] if earlier else 0


def test_a_copier_repeats_and_looks_up_without_fault():
    copier = Answering(what_followed)
    assert accuracy(copier, look_ups(material(), 0, 4, 40)).tolist() == [1.0] * 4
    assert loss(copier, repeated(material(), 0, 4, 40)).tolist() == [0.0] * 4
    assert accuracy(copier, repeated(material(), 0, 4, 40)).tolist() == [1.0] * 4


def test_who_only_knows_the_last_token_neither_repeats_nor_looks_up():
    same = Answering(lambda ids: ids[-1])
    assert accuracy(same, look_ups(material(), 0, 4, 40)).max() == 0
    assert loss(same, repeated(material(), 0, 4, 40)).tolist() == [1000.0] * 4


def test_who_knows_only_the_distance_repeats_but_does_not_look_up():
    """Which is what look-ups are for: in a repeat, counting back would do."""
    half = 19  # of 40 tokens without the one that begins
    counter = Answering(lambda ids: ids[-half] if len(ids) > half else 0)
    assert loss(counter, repeated(material(), 0, 4, 39)).max() == 0
    assert accuracy(counter, look_ups(material(), 0, 8, 39)).mean() < 0.3


def test_an_untrained_model_guesses():
    model = LanguageModel(Shape(vocab_size=SIZE, width=32, depth=2, length=64, causal=True)).eval()
    with torch.no_grad():
        for given in (text(material(), "tale", 8, 40), repeated(material(), 0, 8, 40)):
            assert loss(model, given).mean() == pytest.approx(math.log(SIZE), abs=0.05)
        assert accuracy(model, look_ups(material(), 0, 16, 40)).mean() < 0.1


def test_the_loss_of_a_text_is_that_of_the_instrument():
    model = LanguageModel(Shape(vocab_size=SIZE, width=32, depth=2, length=64, causal=True)).eval()
    given = text(material(), "tale", 4, 40)
    with torch.no_grad():
        assert torch.allclose(loss(model, given), next_token_loss(model, given.inputs))


def test_look_ups_ask_for_the_partner_and_nothing_else():
    given = look_ups(material(), 3, 5, 42)
    for ids, targets in zip(given.inputs["input_ids"].tolist(), given.targets.tolist(), strict=True):
        assert ids[0] == 1  # what begins a text
        ids, targets = ids[1:], targets[1:]
        half = len(ids) // 2
        partner = dict(zip(ids[:half:2], ids[1:half:2], strict=True))
        assert len(set(ids[:half])) == half
        assert targets[:half] == [NOTHING] * half
        assert targets[half:] == [partner.get(token, NOTHING) for token in ids[half:]]
        assert sum(target != NOTHING for target in targets) == half // 2


def test_doubles_are_labelled_by_what_stood_before():
    given = doubles(material(), 0, 4, 33)
    assert len(given.targets) == 8
    for ids, targets in zip(given.inputs["input_ids"].tolist(), given.targets.tolist(), strict=True):
        asked = [i for i, target in enumerate(targets) if target != NOTHING]
        assert len(asked) == 16
        assert [targets[i] for i in asked] == [int(ids[i] in ids[:i]) for i in asked]
        assert sum(targets[i] for i in asked) == 8


def test_means_are_of_other_sequences():
    for make in (repeated, look_ups, doubles):
        mine, same, others = (make(material(), 0, 4, 40, other).inputs["input_ids"] for other in (False, False, True))
        assert torch.equal(mine, same)
        assert not torch.equal(mine, others)


class Hidden(nn.Module):
    """A body that says whether a token stood before, behind noise in other dimensions."""

    def __init__(self, loud):
        super().__init__()
        self.loud = nn.Parameter(torch.tensor(loud))

    def forward(self, input_ids):
        seen = torch.tensor([[float(t in row[:i]) for i, t in enumerate(row)] for row in input_ids.tolist()])
        noise = torch.randn(*input_ids.shape, 8, generator=torch.Generator().manual_seed(0))
        return torch.cat((self.loud * seen[..., None], noise), -1)


def test_the_probe_reads_what_is_there_and_nothing_else():
    given = doubles(material(), 0, 32, 40)
    assert probe(Hidden(1.0), given).tolist() == [1.0] * 64
    assert probe(Hidden(0.0), given).mean() == pytest.approx(0.5, abs=0.05)


def test_the_probe_is_tested_on_sequences_it_was_not_fitted_on():
    """Hidden states so wide that any labels can be learned by heart: what is new is still told by chance."""
    hidden = torch.randn(16, 8, 200)
    targets = torch.randint(2, (16, 8))
    assert read_out(hidden, targets).mean() == pytest.approx(0.5, abs=0.15)


def test_uniform_attention_gives_the_first_token_its_harmonic_share():
    model = LanguageModel(Shape(vocab_size=SIZE, width=32, depth=3, length=64, causal=True)).eval()
    for block in model.body.blocks:
        nn.init.zeros_(block.attention.query.weight)
        nn.init.zeros_(block.attention.query.bias)
    given = text(material(), "tale", 4, 30)
    n = given.inputs["input_ids"].shape[1]
    # Query i of 1 … n − 1 sees i + 1 keys alike.
    expected = sum(1 / (i + 1) for i in range(1, n)) / (n - 1)
    with torch.no_grad():
        assert first_token_mass(model, given).tolist() == pytest.approx([expected] * 4)
        with kq.dial(model, popularity=0):  # a model that is dialled is heard as it is
            assert first_token_mass(model, given).tolist() == pytest.approx([expected] * 4)


def test_the_mass_is_that_of_the_maps_that_a_model_gives():
    transformers = pytest.importorskip("transformers")
    from keyquery.listening import attention_maps

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=SIZE, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(20)  # so that attention is far from uniform
        given = text(material(), "tale", 4, 30)
        maps = torch.stack(attention_maps(model, given.inputs))
        expected = maps[..., 1:, 0].mean((0, 2, 3)).double()
        assert torch.allclose(first_token_mass(model, given), expected, atol=1e-6)


def test_a_constant_guess_finds_as_many_masked_words_as_there_are_of_it():
    stuff = material(causal=False)
    given = hidden_words(stuff, "tale", 4, 40)
    ids, masked = stuff.windows("tale", 4, 40), given.inputs["input_ids"] == 3
    expected = ((ids == 10) & masked).sum(1) / masked.sum(1)
    assert accuracy(Answering(lambda ids: 10), given).tolist() == pytest.approx(expected.tolist())
    assert (given.targets[masked] == ids[masked]).all()
    assert (given.targets[~masked] == NOTHING).all()
    assert not masked[:, [0, -1]].any()  # what frames a text is not asked for


class Bag(nn.Module):
    """Each token's hidden state is its own direction, or the same for all."""

    def __init__(self, apart):
        super().__init__()
        self.apart = nn.Parameter(torch.tensor(apart))

    def forward(self, input_ids):
        return self.apart * nn.functional.one_hot(input_ids, SIZE).float() + 1.0


def test_halves_are_found_by_what_they_share():
    # Of 48 windows four are taken, evenly spread; each holds six letters of its own, over and over, in both halves.
    letters = torch.arange(6).repeat(240).reshape(48, 30) + 6 * (torch.arange(48) // 6)[:, None]
    tale = "".join(chr(200 + int(n)) for n in letters.flatten())
    given = halves(Material({"tale": tale}, Letters(), False, SIZE), "tale", 4, 32)
    assert given.inputs["input_ids"].shape == (8, 17)
    assert (given.inputs["input_ids"][:, [0, -1]] == torch.tensor([1, 2])).all()
    assert neighbours(Bag(1.0), given).tolist() == [1.0] * 4
    assert neighbours(Bag(0.0), given).mean() == 0.25  # all alike: the first is as good as any


def test_hidden_states_are_those_before_the_head():
    model = LanguageModel(Shape(vocab_size=SIZE, width=32, depth=1, length=64)).eval()
    batch = {"input_ids": torch.arange(4, 14)[None]}
    with torch.no_grad():
        assert torch.allclose(last_hidden(model, batch) @ model.tokens.weight.mT, model(**batch), atol=1e-6)


def test_windows_never_overlap_and_are_framed():
    tale = "".join(chr(200 + n % 50) for n in range(1000))
    stuff = Material({"tale": tale}, Letters(), False, SIZE)
    stuff.texts["tale"] = torch.arange(10, 1010)  # ids that tell where they stood
    first, second = (stuff.windows("tale", count, 22, count > 6) for count in (6, 33))
    assert (first.shape, second.shape) == ((6, 22), (33, 22))
    inner = torch.cat((first, second))[:, 1:-1].flatten()
    assert len(inner.unique()) == len(inner)
    assert (first[:, 0] == 1).all()
    assert (first[:, -1] == 2).all()


def test_a_short_text_gives_short_windows_rather_than_few():
    stuff = material(size=100)
    assert stuff.windows("tale", 64, 60).shape == (16, 1 + 2)
    assert stuff.windows("tale", 64, 60, True).shape == (32, 1 + 2)
    with pytest.raises(ValueError, match="tale is too short: 90 tokens, expected at least 96"):
        material(size=90).windows("tale", 16, 60)


def test_random_tokens_are_of_the_text_and_never_twice():
    stuff = material()
    drawn = stuff.random(5, 40, 0)
    assert set(drawn.flatten().tolist()) <= set(stuff.pool.tolist())
    assert all(len(row.unique()) == 40 for row in drawn)
    few = material(size=20)  # whose letters do not suffice
    assert set(few.random(3, 60, 0).flatten().tolist()) == set(range(4, SIZE))
    with pytest.raises(ValueError, match="length must be at most 60, the number of tokens there are, got 61"):
        few.random(3, 61, 0)


def test_without_a_tokenizer_there_is_no_text():
    with pytest.raises(ValueError, match="no tokenizer beside it"):
        Material({"tale": "a"}, None, True, SIZE)


def test_targets_that_are_nowhere_are_not_counted():
    targets = torch.tensor([[5, NOTHING, 7]])
    given = Sequences({"input_ids": torch.tensor([[4, 5, 6]])}, targets)
    assert accuracy(Answering(lambda ids: 5), given).tolist() == [0.5]
