"""kq.TimeAttention: what it scores, written out; what a shift of all times changes; and a task that needs the span."""

import math

import pytest
import torch
from torch import nn

import keyquery as kq
from keyquery.forms.parts import PARTS
from keyquery.learn.training import Recipe, train
from keyquery.testing import check_kernel

WAYS = ("concatenated", "additive", "interaction")
DIM, CODE = 12, 8


def made(how, kernel="general", **options):
    layer = kq.TimeAttention(DIM, 2, kq.MercerTime(CODE, 2, [3.0, 7.0]), how=how, kernel=kernel, **options).double()
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.5)
    return layer


def events(batch=2, n=9):
    x = torch.randn(batch, n, DIM, dtype=torch.float64)
    return x, torch.rand(batch, n, dtype=torch.float64).cumsum(1)


# Against every score written out


@pytest.mark.parametrize("options", [{}, {"kv_heads": 1}, {"rope": kq.Rope(6)}], ids=["plain", "grouped", "rotary"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_additive_scores_are_the_sum_of_both(options, is_causal):
    layer, (x, times) = made("additive", **options), events()
    query, key = (part[..., :6] for part in layer.joint.queries_and_keys(torch.cat((x, x[..., :CODE]), -1)))
    if "rope" in options:
        query, key = (options["rope"].rotate(part, torch.arange(9)) for part in (query, key))
    scores = query @ key.expand(-1, 2, -1, -1).mT / math.sqrt(6)
    lags = times[:, None, :, None] - times[:, None, None]
    for row, a in enumerate(layer.joint.weights()):
        for weight, share, frequency in zip(a, layer.time.shares(), layer.time.frequencies(), strict=True):
            scores[:, row] = scores[:, row] + weight * share * torch.cos(frequency * lags[:, 0])
    if is_causal:
        scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    value = layer.joint.value(x).unflatten(-1, (-1, 6)).transpose(1, 2)
    out = layer.joint.output((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
    assert torch.allclose(layer(x, times, is_causal=is_causal), out, atol=1e-12)


def test_rbf_takes_the_norm_of_the_event_alone():
    layer, (x, times) = made("additive", "rbf"), events()
    z = layer.joint.key(x).unflatten(-1, (2, 6)).transpose(1, 2)
    scores = -(z.unsqueeze(-2) - z.unsqueeze(-3)).square().sum(-1) / 2 / math.sqrt(6)
    reading = layer.time_kernel((times[:, :, None] - times[:, None]).flatten())
    added = torch.tensor(reading.heads, dtype=torch.float64).unflatten(1, (2, 9, 9)).transpose(0, 1)
    assert min(layer.joint.weights().flatten()) > 0
    value = layer.joint.value(x).unflatten(-1, (2, 6)).transpose(1, 2)
    out = layer.joint.output(((scores + added).softmax(-1) @ value).transpose(1, 2).flatten(2))
    assert torch.allclose(layer(x, times), out, atol=1e-10)


def test_concatenated_is_attention_over_both():
    layer, (x, times) = made("concatenated"), events()
    z = torch.cat((x, math.sqrt(CODE) * layer.time.encode(times)), -1)
    query, key, value = (
        part(z).unflatten(-1, (2, 6)).transpose(1, 2)
        for part in (layer.joint.query, layer.joint.key, layer.joint.value)
    )
    weights = (query @ key.mT / math.sqrt(6)).softmax(-1)
    assert torch.allclose(layer(x, times), layer.joint.output((weights @ value).transpose(1, 2).flatten(2)), atol=1e-12)


# Shifts


@pytest.mark.parametrize("how", WAYS)
def test_only_the_additive_way_does_not_see_a_shift_from_its_origin(how):
    layer, (x, times) = made(how), events()
    moved = (layer(x, times + 123.456, origin=0.0) - layer(x, times, origin=0.0)).abs().max()
    assert moved < 1e-10 if how == "additive" else moved > 1e-3
    assert (layer(x, times + 123.456) - layer(x, times)).abs().max() < 1e-10  # each sequence's own clock


# What it promises as a layer


class Timed(nn.Module):
    """With times of its own, so that it has the signature of an attention layer."""

    promises = ("causal", "padding", "gradients", "round_trip")

    def __init__(self, layer):
        super().__init__()
        self.layer, self.dim = layer, layer.dim

    def forward(self, x, mask=None, is_causal=False):
        times = torch.arange(x.shape[1], dtype=torch.float64).sqrt().expand(x.shape[:2])
        times = times if mask is None else times.where(mask, torch.nan)
        return self.layer(x, times, mask, is_causal)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("compiled", [None, pytest.param("eager", marks=pytest.mark.slow)])
def test_it_keeps_the_promises_of_a_layer(how, compiled):
    code = kq.BochnerTime(CODE) if how == "additive" else kq.MercerTime(CODE, 2, 2)
    check_kernel(Timed(kq.TimeAttention(DIM, 2, code, how=how, kernel="pairwise")), compiled)


@pytest.mark.parametrize("how", WAYS)
def test_decoding_with_a_cache_equals_the_full_pass(how):
    layer, (x, times) = made(how), events()
    cache = kq.Cache()
    whole = layer(x, times, is_causal=True, origin=0.0)
    parts = [
        layer(x[:, some], times[:, some], is_causal=True, origin=0.0, cache=cache)
        for some in (slice(0, 5), slice(5, 6), slice(6, 9))
    ]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-12)
    with pytest.raises(ValueError, match="a cache needs an origin"):
        layer(x, times, cache=kq.Cache())


def test_causality_goes_by_order_and_ties_are_allowed():
    layer, (x, times) = made("additive"), events()
    times[:, 5] = times[:, 4]
    times[:, 7] = 0.0  # earlier than all, and still in its place
    x.requires_grad_()
    layer(x, times, is_causal=True)[:, 4].sum().backward()
    assert x.grad[:, 5:].abs().max() == 0
    assert (x.grad[:, :5].abs().amax(-1) > 0).all()


# Instruments


@pytest.mark.parametrize("kernel", ["general", "psd", "skew"])
@pytest.mark.parametrize("how", WAYS)
def test_its_form_gives_its_scores(how, kernel):
    layer, (x, times) = made(how, kernel, bias=False), events(1)
    z = layer.join(x, times)
    query, key = layer.joint.queries_and_keys(z)
    form = layer.form()
    assert torch.allclose(form.scores(z), (query @ key.mT)[0], atol=1e-12)
    assert torch.allclose(form.symmetric.scores(z) + form.skew.scores(z), form.scores(z), atol=1e-10)
    if kernel == "psd":
        assert form.symmetry.min() > 1 - 1e-12
        assert all(head.symmetric_eigenvalues().min() > -1e-9 for head in form)


@pytest.mark.parametrize("how", WAYS)
def test_look_reads_events_and_times_together(how):
    layer, (x, times) = made(how), events(8)
    reading = kq.look(layer, inputs=[{"x": x, "times": times}])
    expected = layer.form().symmetry.flatten().tolist()
    assert [head["raw"]["symmetry"] for head in reading.heads] == pytest.approx(expected)
    for head in reading.heads:
        assert sum(head["on_data"][part] for part in (*PARTS, "interaction")) == pytest.approx(1)


@pytest.mark.parametrize("how", WAYS)
def test_the_time_kernel_of_a_layer(how):
    layer = made(how)
    reading = layer.time_kernel(torch.tensor([0.0, 2.0]))
    assert reading.values == pytest.approx(layer.time.kernel(torch.tensor([0.0, 2.0])).tolist())
    assert sum(row["share"] for row in reading.spectrum) == pytest.approx(1)
    assert (reading.heads is not None) == (how == "additive")
    assert [(row["lag"], row["psi"]) for row in reading.records()] == list(zip([0.0, 2.0], reading.values, strict=True))
    assert kq.Reading.load(reading.to_json()) == reading
    figure = reading.plot()
    assert len(figure.axes) == 2
    drawn = figure.axes[0].get_lines()[1].get_ydata()
    assert list(drawn) == pytest.approx(reading.values if reading.heads is None else reading.heads[0])


@pytest.mark.unchecked
def test_bad_input_is_told():
    code, (x, times) = kq.MercerTime(CODE, 2, 2), events()
    for call, words in (
        (lambda: kq.TimeAttention(DIM, 2, code, how="added"), "how must be one of 'concatenated', 'additive', 'inter"),
        (lambda: kq.TimeAttention(DIM, 5, code), "heads must divide dim"),
        (lambda: made("additive")(x, times[:, 1:]), r"times must be \(2, 9\), one per event of x, got \(2, 8\)"),
        (lambda: made("additive")(x[..., 1:], times), r"x must be \(batch, n, 12\)"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match=r"time must be a kq\.BochnerTime or kq\.MercerTime, got int"):
        kq.TimeAttention(DIM, 2, 8)


# A task that needs the span


class Span(nn.Module):
    """Types and places of twelve events, one layer of attention, the answer read at the last."""

    def __init__(self, code):
        super().__init__()
        self.types, self.places = nn.Embedding(4, 32), nn.Embedding(12, 32)
        self.timed = code is not None
        self.attention = kq.TimeAttention(32, 2, code) if self.timed else kq.Attention(32, 2)
        self.read = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, types, times):
        x = self.types(types) + self.places.weight
        return self.read((x + self.attention(x, *((times,) if self.timed else ())))[:, -1])


def spans(step, generator, count=128):
    types = torch.randint(0, 4, (count, 12), generator=generator)
    times = (2 * torch.rand(count, 12, generator=generator, dtype=torch.float64)).cumsum(1)
    return types, times, (torch.sin(2 * math.pi * (times[:, -1] - times[:, 6]) / 3) > 0).long()


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("code", "least", "most"),
    [
        (lambda: kq.MercerTime(80, degree=5, periods=8), 0.95, 1),
        (lambda: kq.BochnerTime(64, "free"), 0.65, 1),
        (lambda: None, 0, 0.56),
    ],
    ids=["mercer", "free", "positions"],
)
def test_a_span_is_learned_as_well_as_promised(code, least, most):
    new, code = spans(0, torch.Generator().manual_seed(99), 4000), code()
    if code is not None:
        code.see(spans(0, torch.Generator().manual_seed(98), 1000)[1])
    model = Span(code)
    recipe = Recipe(1500, lr=3e-3, schedule="flat", warmup=0, weight_decay=0.0, clip=None)
    train(model, spans, lambda model, batch: nn.functional.cross_entropy(model(*batch[:2]), batch[2]), recipe)
    assert least <= (model(*new[:2]).argmax(1) == new[2]).double().mean() <= most
