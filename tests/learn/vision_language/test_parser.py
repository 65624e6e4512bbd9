"""VisualParser: it learns what is said of what is seen, is the same again for a seed, and keeps what it learned."""

from itertools import permutations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import keyquery as kq
from keyquery.learn.inputs.captions import FIRST, MASK, PAD
from keyquery.learn.layers.vision import VisionEncoder
from keyquery.learn.vision_language.network import Seen, VisionLanguageNetwork
from keyquery.learn.vision_language.parser import word_vectors
from keyquery.learn.vision_language.training import Batch, Pairs, _patches, hide_words, losses, others

NAMES = ("red", "green", "blue", "yellow", "grey")
COLOURS = dict(zip(NAMES, ((220, 40, 40), (30, 190, 60), (40, 60, 220), (230, 220, 40), (120,) * 3), strict=True))

WORDS = ["[PAD]", "[UNK]", "above", "left", "of", *COLOURS, "crimson"]  # of a text encoder


def fields(count, seed):
    """Two coloured fields beside or above one another, with noise, and what is to be said of them."""
    rng, pairs = np.random.default_rng(seed), list(permutations(COLOURS, 2))
    images, said = np.zeros((count, 8, 8, 3)), []
    for image in images:
        a, b = pairs[rng.integers(len(pairs))]
        above = rng.random() < 0.5
        image[:4] = COLOURS[a]
        image[4:] = COLOURS[b]
        if not above:
            image[:] = image.transpose(1, 0, 2).copy()
        image += rng.normal(0, 12, image.shape)
        said.append((a, "above" if above else "left of", b))
    return np.clip(images, 0, 255).astype(np.uint8), said


def texts(said, exchanged=False):
    return [f"{b} {how} {a}" if exchanged else f"{a} {how} {b}" for a, how, b in said]


def small(**options):
    sizes = {"size": 8, "patch": 4, "width": 32, "heads": 2, "depth": 2, "parser_depth": 1, "epochs": 2}
    return kq.VisualParser(**{**sizes, "random_state": 0, "device": "cpu", **options})


@pytest.fixture(scope="module")
def fitted():
    images, said = fields(96, 0)
    return small().fit(images, texts(said))


def accuracy(true, false):
    return (np.mean(true > 0.5) + np.mean(false < 0.5)) / 2


@pytest.mark.unchecked
@pytest.mark.slow  # the example of VisualParser learns, too
def test_it_learns_which_text_is_of_which_image_and_nothing_when_images_are_shuffled():
    images, said = fields(640, 0)
    model = small(width=16, depth=1, epochs=30, lr=1e-2, batch_size=64).fit(images, texts(said))
    images, said = fields(200, 1)
    false = fields(200, 2)[1]
    wrong = [i for i in range(200) if false[i] != said[i]]
    own, other = model.match(images, texts(said)), model.match(images, texts(false))
    exchanged = model.match(images, texts(said, exchanged=True))
    assert accuracy(own[wrong], other[wrong]) >= 0.95
    assert accuracy(own, exchanged) >= 0.9
    order = np.roll(np.arange(200), 1)
    blind, turned = model.match(images[order], texts(said)), model.match(images[order], texts(said, exchanged=True))
    assert 0.4 < accuracy(blind, turned) < 0.6


def test_the_history_holds_the_terms_of_the_loss(fitted):
    assert [set(row) for row in fitted.history_] == [{"epoch", "loss", "words", "match", "features"}] * 2
    row = fitted.history_[0]
    assert row["loss"] == pytest.approx(row["words"] + row["match"] + row["features"], rel=1e-5)


def test_all_pairs_are_matched_as_each_alone_whatever_stands_beside(fitted):
    images, said = fields(3, 1)
    named = [*texts(said)[:2], "red"]  # shorter: padded
    crossed = fitted.match(images, named, crossed=True)
    alone = [[fitted.match(image[None], [text])[0] for text in named] for image in images]
    assert np.allclose(crossed, alone, atol=1e-6)
    assert np.allclose(fitted.match(images, named), np.diag(crossed), atol=1e-6)
    assert np.allclose(fitted.match(images[:1], ["RED above blue"]), fitted.match(images[:1], ["red above blue"]))


def test_heads_of_a_file_are_those_of_both_encoders(fitted, tmp_path):
    fitted.save(tmp_path / "model.safetensors")
    assert len(kq.look(tmp_path / "model.safetensors").heads) == 6  # a layer of the parser, two of the joint encoder


def test_a_parser_that_is_frozen_does_not_learn():
    images, said = fields(64, 0)
    model = small(parser_depth=0, frozen=True).fit(images, texts(said))
    start = small(parser_depth=0, frozen=True, epochs=1, lr=0.0).fit(images, texts(said))
    assert torch.equal(model.network_.vision.patches.weight, start.network_.vision.patches.weight)
    assert not torch.equal(model.network_.matcher.weight, start.network_.matcher.weight)


def tiny(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "dino":
        return transformers.Dinov2Model(transformers.Dinov2Config(**sizes, mlp_ratio=2))
    if kind == "swin":
        shape = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]}
        return transformers.SwinModel(transformers.SwinConfig(**shape, window_size=2))
    return transformers.ViTModel(transformers.ViTConfig(**sizes, intermediate_size=32), add_pooling_layer=False)


@pytest.mark.parametrize(("kind", "size", "tokens"), [("dino", 16, 16), ("vit", 24, 36), ("swin", 16, 16)])
def test_backbones_of_transformers_see_as_they_do_alone(kind, size, tokens, tmp_path):
    given = tiny(kind)
    before = {name: weight.clone() for name, weight in given.state_dict().items()}
    images, said = fields(32, 0)
    options = {"backbone": given, "patch": 5, "epochs": 1, "batch_size": 16}
    model = small(size=size, **options).fit(images, texts(said))
    vision = model.network_.vision
    assert (vision.tokens, vision.dim) == (tokens, 16)
    for name, weight in vision.model.state_dict().items():
        assert torch.equal(weight, before[name])  # frozen
    x = torch.randn(2, 3, size, size)
    options = {} if kind != "vit" else {"interpolate_pos_encoding": True}
    alone = given.eval()(pixel_values=x, **options).last_hidden_state
    features, attention = vision.with_attention(x)
    assert torch.allclose(features, alone[:, -tokens:], atol=1e-5)
    assert torch.all(attention.sum(-1) <= 1 + 1e-5)  # the rest goes to tokens that are no patch
    model.save(tmp_path / "model.safetensors")
    again = kq.VisualParser.load(tmp_path / "model.safetensors", device="cpu")
    assert np.allclose(again.match(images, texts(said)), model.match(images, texts(said)), atol=1e-6)
    learning = small(size=size, backbone=given, frozen=False, epochs=1).fit(images, texts(said))
    moved = dict(learning.network_.vision.model.named_parameters())
    assert any(not torch.equal(weight, before[name]) for name, weight in moved.items())
    assert all(torch.equal(weight, before[name]) for name, weight in given.state_dict().items())  # a copy learned


def network(depth=1):
    torch.manual_seed(0)
    return VisionLanguageNetwork(VisionEncoder(8, 4, 16, depth, 2), words=9, longest=4, width=16, depth=2, heads=2)


def test_patches_are_hidden_together_with_those_that_they_attend_to():
    attention, seeds = torch.rand(5, 7, 7), [0, 3, 6, 2, 2]
    found = _patches(Seen(torch.zeros(5, 7, 1), attention), torch.eye(7)[seeds], 3)
    for row, seed, mask in zip(attention, seeds, found, strict=True):
        near = sorted((j for j in range(7) if j != seed), key=lambda j: -row[seed, j])[:2]
        assert set(mask.nonzero().flatten().tolist()) == {seed, *near}


def test_the_parser_gives_its_features_and_its_last_attention():
    parser = VisionEncoder(8, 2, 16, depth=2, heads=2)
    images = torch.randn(3, 3, 8, 8)
    features, attention = parser.with_attention(images)
    assert torch.allclose(features, parser(images), atol=1e-6)
    inputs = []
    hook = parser.encoder.blocks[-1].attention.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    parser(images)
    hook.remove()
    query, key = parser.encoder.blocks[-1].attention.queries_and_keys(inputs[0])
    assert torch.allclose(attention, (query @ key.mT / 8**0.5).softmax(-1).mean(1), atol=1e-6)
    moved = torch.zeros(1, 3, 8, 8)
    moved[..., 2:4, 6:8] = 1  # row 1, column 3
    flat = VisionEncoder(8, 2, 16, depth=0, heads=2)
    changed = (flat(moved) - flat(torch.zeros(1, 3, 8, 8))).abs().sum(-1)[0]
    assert changed.nonzero().flatten().tolist() == [1 * 4 + 3]


def test_hidden_words_are_known_ones_and_one_of_each_text_at_least():
    ids = torch.tensor([[2, 3, 4, PAD], [MASK, 5, PAD, PAD], [2, 2, 2, 2]])
    hidden = torch.stack([hide_words(ids, 0.15, torch.Generator().manual_seed(seed)) for seed in range(20)])
    assert hidden.any(2).all()
    assert not (hidden & (ids < FIRST)).any()


def test_negatives_are_other_texts_and_half_of_them_have_the_same_words():
    ids = torch.tensor([[2, 3, 4]]).expand(200, -1)
    pool = torch.tensor([[2, 3, 4], [5, 6, 7], [4, 3, 2], [2, 3, 7], [8, 8, 8]])
    other, usable = others(ids, pool, 9, torch.Generator().manual_seed(0))
    assert usable.all()
    counts = np.bincount(other.numpy(), minlength=5)
    assert counts[0] == 0
    assert 100 < counts[2] < 150  # half, and a quarter of the others
    assert not others(ids, pool[:1], 9, torch.Generator())[1].any()


def test_losses_are_those_of_each_task_alone():
    model = network(depth=0)  # without attention: random patches
    ids = torch.tensor([[2, 3, 4, PAD], [5, 6, 7, 8]])
    pairs = Pairs(torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8), ids)
    hidden, other = torch.tensor([[True, False, False, False], [False, False, True, True]]), ids.flip(0)
    dice = torch.tensor([[0.1, 0.9, 0.2, 0.3], [0.8, 0.1, 0.7, 0.2]])
    batch = Batch(torch.tensor([0, 1]), ids, hidden, other, torch.tensor([True, False]), dice)
    parts = losses(model, pairs, batch, 2)
    features = model.see(pairs.images).features
    words = model.spell(model(features, ids.masked_fill(hidden, MASK)))
    assert torch.allclose(parts["words"], cross_entropy(words[hidden], ids[hidden]), atol=1e-5)
    own, wrong = model.match(model(features, ids)), model.match(model(features, other))
    found = -(own.sigmoid().log().sum() + (1 - wrong[0].sigmoid()).log()) / 3  # the second has no negative
    assert torch.allclose(parts["match"], found, atol=1e-5)
    shut = torch.tensor([[False, True, False, True], [True, False, True, False]])
    target = (features - features.mean(-1, keepdim=True)) / features.std(-1, keepdim=True, unbiased=False)
    error = (model.regress(model(features, ids, shut)) - target).square().mean(-1)[shut].mean()
    assert torch.allclose(parts["features"], error, atol=1e-3)


def test_no_gradient_goes_through_the_features_to_regress():
    model = network()
    ids = torch.tensor([[2, 3, 4, 5]])
    pairs = Pairs(torch.randint(256, (1, 3, 8, 8), dtype=torch.uint8), ids)
    drawn = (torch.tensor([0]), ids, ids == 2, ids, torch.tensor([True]), torch.rand(1, 4))
    for hidden in (4, 2):  # if all are hidden, there is no other way in
        losses(model, pairs, Batch(*drawn), hidden)["features"].backward()
        assert any(weight.grad is not None and weight.grad.any() for weight in model.vision.parameters()) == (
            hidden < 4
        )


@pytest.fixture(scope="module")
def encoder():
    """A tiny BERT, whose "crimson" has the embedding of "red"."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        table = model.embeddings.word_embeddings.weight
        table.normal_()
        table[WORDS.index("crimson")] = table[WORDS.index("red")]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: n for n, name in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    return model, tokenizer


def test_vectors_are_means_of_hidden_states_and_padding_does_not_matter(encoder):
    model, _ = encoder
    model.train()
    found = word_vectors(encoder, ["red", "left of red", "blue"])
    assert model.training  # it is given back as it was
    model.eval()
    with torch.no_grad():
        alone = (
            model(torch.tensor([[WORDS.index(word) for word in ("left", "of", "red")]])).last_hidden_state[0].mean(0)
        )
    expected = (alone - alone.mean()) / alone.std(unbiased=False)
    assert torch.allclose(found[1], expected, atol=1e-3)
    assert torch.allclose(found[0], word_vectors(encoder, ["red"])[0], atol=1e-5)


def test_it_learns_with_them_and_knows_words_of_the_same_vector(encoder, tmp_path):
    images, said = fields(96, 0)
    model = small(text_encoder=encoder, epochs=3).fit(images, texts(said))
    exchanged = [text.replace("red", "crimson") for text in texts(said)]
    assert any("crimson" in text for text in exchanged)
    plain = model.match(images, texts(said))
    assert np.allclose(model.match(images, exchanged), plain, atol=1e-4)
    without = small(epochs=3).fit(images, texts(said))
    assert not np.allclose(without.match(images, exchanged), without.match(images, texts(said)), atol=1e-4)
    model.save(tmp_path / "model")
    again = kq.VisualParser.load(tmp_path / "model", device="cpu")
    assert np.array_equal(again.match(images, texts(said)), plain)
    again.text_encoder = encoder
    assert np.allclose(again.match(images, exchanged), plain, atol=1e-4)


def test_a_folder_is_the_same_as_the_pair(encoder, tmp_path):
    for part in encoder:
        part.save_pretrained(tmp_path)
    words = ["red", "left"]
    assert torch.allclose(word_vectors(tmp_path, words), word_vectors(encoder, words), atol=1e-5)


def test_what_is_no_text_encoder_is_refused(encoder):
    images, said = fields(8, 0)
    with pytest.raises(TypeError, match="text_encoder must be a folder or a pair"):
        small(text_encoder=encoder[0]).fit(images, texts(said))
    with pytest.raises(ValueError, match="text_encoder must have a tokenizer"):
        small(text_encoder=(encoder[0], None)).fit(images, texts(said))
