"""Single directions in a running model, against dense algebra on the model's own inputs and edited weights."""

import copy
import itertools
from contextlib import contextmanager

import pytest
import torch

import keyquery as kq
from keyquery.intervene.dial.directions import basis_of
from keyquery.intervene.dial.means import Means
from keyquery.intervene.rewrites import sites_of
from keyquery.listening.hooks import entry
from keyquery.proof.families import tiny_inputs, tiny_model
from tests.listening.models import assert_as_it_was, entered, snapshot

KINDS = ("singular", "symmetric", "skew")
MODELS = ["gpt2", "llama", "gpt_neox", "gptj"]  # learned positions, RoPE with GQA, partial, interleaved


def wide(name):
    model = tiny_model(name).double()
    with torch.no_grad():
        for weight in model.parameters():  # biases and gains that matter
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    ids = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(2))
    return model, {"input_ids": ids}


def output(model, batch):
    with torch.no_grad():
        out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out[0]


@contextmanager
def scores_of(model, layer):
    """The scaled scores of a layer while the model runs, (batch, heads, n, n)."""
    site, scores = sites_of(model)[layer], []

    def keep(call):
        if call.module is site.module:
            scores.append(call.scale * call.query @ call.keys().mT)

    with kq.listen(model, keep):
        yield scores


def dense_change(layer, head, x, kind, number):
    """(x·u) f(Δ) (y·v) by dense M(Δ), for every pair of tokens of one sequence: what ablation takes away."""
    form = layer.head(head).to(torch.float64)
    if kind == "singular":
        u, v = (vectors[:, number] for vectors in form.svd()[::2])
    elif kind == "symmetric":
        values, vectors = torch.linalg.eigh(form.symmetric.dense())
        u = v = vectors[:, values.abs().argsort(descending=True)[number]]
    else:
        u, v = (vectors[:, number] for vectors in form.skew_planes()[1:])
    change = torch.zeros(len(x), len(x), dtype=torch.float64)
    for i, j in itertools.product(range(len(x)), repeat=2):
        m = (form if layer.rope is None else form.at(j - i, layer.rope)).dense()
        value, along = u @ m @ v, (x[i] @ u) * (v @ x[j])
        if kind == "skew":
            value, along = (value - v @ m @ u) / 2, along - (x[i] @ v) * (u @ x[j])
        change[i, j] = value * along
    return change


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_direction_of_the_weights_by_dense_algebra(name, kind):
    model, batch = wide(name)
    layer = kq.read(model)[1]
    x = entered(model, batch, entry(layer)).reshape(2, 6, -1)
    before, plain, gain = snapshot(model), output(model, batch), 0.25
    head, number = 1, 1
    with kq.dial(model, directions={(1, head): [number]}, gain=1), scores_of(model, 1) as scores:
        assert torch.equal(output(model, batch), plain)
    unchanged = scores[0][:, head]
    with kq.dial(model, directions={(1, head): [number]}, of=kind, gain=gain), scores_of(model, 1) as scores:
        changed = output(model, batch)
    expected = torch.stack([dense_change(layer, head, row, kind, number) for row in x]) * layer.scale
    error = scores[0][:, head] - unchanged - (gain - 1) * expected
    assert expected.abs().max() > 1e-3 * unchanged.abs().max()
    assert error.abs().max() < 1e-6 * unchanged.abs().max()
    assert not torch.allclose(changed, plain)
    assert torch.equal(output(model, batch), plain)
    assert_as_it_was(model, before)


def test_a_singular_direction_is_an_edit_of_the_weights():
    """Without RoPE, ablating σuvᵀ is the projection of the query weights off u: (I − uuᵀ)M."""
    model, batch = wide("bert")
    layer = kq.read(model)[0]
    left, _, _ = layer.head(2).svd()
    u = left[:, :2]
    edited = copy.deepcopy(model)
    weight = edited.encoder.layer[0].attention.self.query.weight
    width = weight.shape[0] // layer.heads
    with torch.no_grad():
        rows = weight[2 * width : 3 * width]
        rows.sub_(rows @ u @ u.mT)
    with kq.dial(model, directions={"0.2": [0, 1]}):
        dialled = output(model, batch)
    torch.testing.assert_close(dialled, output(edited, batch), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(dialled, output(model, batch))


PARTS = {"symmetric": ["symmetric"], "skew": ["skew"], "singular": ["symmetric", "skew"]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "means"), [("bert", "position"), ("t5", "global")])
def test_all_directions_on_data_are_the_part(name, kind, means):
    """What the directions of S, A or M leave out together is what the dial leaves out."""
    model = tiny_model(name).double()
    first = {key: value for key, value in tiny_inputs(name, model).items() if "mask" not in key}
    data = [{key: torch.randint(3, 60, (40, 7)) for key in first}]
    measured = Means(model, data, means)
    form = sites_of(model)[0].read().form
    count = {"singular": form.rank, "symmetric": 2 * form.rank, "skew": form.rank}[kind]
    assert 2 * form.rank <= form.dim
    scores = []
    for options in (
        {"heads": "0.1", "data": measured, **dict.fromkeys(PARTS[kind], 0)},
        {"directions": {(0, 1): range(count)}, "of": kind, "on": "data", "data": measured},
    ):
        with kq.dial(model, **options), scores_of(model, 0) as captured:
            output(model, data[0])
        scores.append(captured[0][:, 1] - captured[0][:, 1].mean(-1, keepdim=True))  # softmax ignores the mean
    assert (scores[0] - scores[1]).abs().max() < 1e-5 * scores[0].abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_directions_of_rotary_heads_on_data_sum_to_the_part_at_offset_zero(kind):
    model = tiny_model("qwen3").double()  # RoPE and QK-norm
    data = [{"input_ids": torch.randint(3, 60, (40, 7))}]
    site = sites_of(model)[0]
    basis = basis_of(kind, Means(model, data, "position").covariance(site)[1], site.turn.rope)
    rank = site.read().form.rank
    joint = torch.randn(5, 2 * rank, dtype=torch.float64)
    pairs = joint[:, :rank] @ joint[:, rank:].mT
    expected = {"singular": pairs, "symmetric": (pairs + pairs.mT) / 2, "skew": (pairs - pairs.mT) / 2}[kind]
    unit = torch.ones(rank, dtype=torch.float64)
    unit[rank // 2 :] = 0  # the real part of every rotary plane, halves layout
    terms = torch.einsum("xn,dtn,dtr,r,dtm,ym->xy", joint, basis.left, basis.curves, unit, basis.right, joint)
    torch.testing.assert_close(terms, expected, rtol=1e-5, atol=1e-5)


def test_data_without_variance_about_its_means_is_refused():
    model, batch = wide("gpt2")
    same = {"input_ids": batch["input_ids"][:1].expand(4, -1)}
    with pytest.raises(ValueError, match="data has no variance about its means by position"):
        kq.dial(model, directions={"0.1": [0]}, on="data", data=[same], means="position")


@pytest.mark.parametrize("kind", KINDS)
def test_directions_on_data_are_those_of_the_weighted_form(kind):
    """Σ^½MΣ^½ with the d×d covariance of the inputs, against the 2r×2r covariance of [q; k]."""
    model, batch = wide("gpt2")
    layer = kq.read(model)[0]
    x = entered(model, batch, entry(layer)).double()
    form = layer.head(1).to(torch.float64).on(torch.cov(x.mT, correction=0))
    measured = Means(model, [batch], "global")
    basis = basis_of(kind, measured.covariance(sites_of(model)[0])[1], None)
    values = {
        "singular": form.singular_values(),
        "symmetric": form.symmetric_eigenvalues(),
        "skew": form.skew_values()[::2],
    }[kind]
    values = values[values.abs().argsort(descending=True)]
    torch.testing.assert_close(basis.values[:4], values[:4], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(basis.shares.sum(), torch.ones((), dtype=torch.float64))


def test_directions_of_several_heads_and_a_cache():
    model, batch = wide("llama")
    plain = output(model, batch)
    with kq.dial(model, directions={"0.0": [0], "1.*": [1, 2]}, gain=1):
        assert torch.equal(output(model, batch), plain)
    with kq.dial(model, directions={"0.0": [1], (1, 0): [0, 3]}, gain=-1):
        changed = output(model, batch)
        cached = model(batch["input_ids"][:, :3], use_cache=True)
        last = model(batch["input_ids"][:, 3:], past_key_values=cached.past_key_values)[0]
        torch.testing.assert_close(last, changed[:, 3:], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(changed, plain)
    assert torch.equal(output(model, batch), plain)


def test_half_precision_follows_double():
    model, batch = wide("gpt2")
    with kq.dial(model, directions={"0.1": [0, 1]}):
        expected = output(model, batch)
    half = model.to(torch.bfloat16)
    with kq.dial(half, directions={"0.1": [0, 1]}):
        given = output(half, batch)
    assert (given.double() - expected).norm() < 0.05 * expected.norm()


REFUSED = {
    "of": ({"of": "eigen"}, "of must be one of 'singular', 'symmetric', 'skew', got 'eigen'"),
    "on": ({"on": "text"}, "on must be one of 'weights', 'data', got 'text'"),
    "no data": ({"on": "data"}, r'on="data" needs data: batches for the model'),
    "data for weights": ({"data": [{}]}, r'data needs on="data"'),
    "a gain": ({"gain": 1e9}, "gain must be a gain from"),
    "parts too": ({"skew": 0.0}, "omit heads and gains on parts"),
    "heads too": ({"heads": "0.1"}, "omit heads and gains on parts"),
    "a direction": ({"directions": {"0.1": [8]}}, "a direction of 0.1 must be between 0 and 7, got 8"),
    "a head": ({"directions": {"0.9": [0]}}, "layer 0 has no head 9"),
    "none": ({"directions": {"0.1": []}}, "directions of 0.1 must name at least one, got none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_in_one_sentence(case):
    model, _ = wide("gpt2")
    options, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        kq.dial(model, **{"directions": {"0.1": [0]}, **options})


def test_heads_without_a_bilinear_form_of_the_weights_are_refused():
    with pytest.raises(ValueError, match=r'has QK-norm, .*: use on="data"'):
        kq.dial(tiny_model("qwen3"), directions={"0.1": [0]})
    with pytest.raises(ValueError, match="is an MLA layer, whose heads have two QK forms"):
        kq.dial(tiny_model("deepseek"), directions={"0.1": [0]})
    with pytest.raises(ValueError, match="has an rbf kernel, whose scores are no QK form"):
        kq.dial(kq.Attention(8, 2, kernel="rbf").eval(), directions={"0.1": [0]})
    with pytest.raises(ValueError, match="this dial scales directions, not parts"), kq.dial(tiny_model("gpt2"), directions={"0.1": [0]}) as dial:  # fmt: skip  # noqa: E501
        dial.turn(skew=0)
