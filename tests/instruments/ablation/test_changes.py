"""Every change costs what the model costs that was changed in another way: dial, project, ablate_heads, or by hand."""

import math

import pytest
import torch

import keyquery as kq
from keyquery.instruments.ablation.changes import Quantiser, hadamard
from keyquery.intervene.rewrites import sites_of
from tests.instruments.ablation.oracles import decoder, exact, losses_of_logits, text

NAMES = ("llama", "gpt2", "gemma2", "bloom", "falcon", "gpt_oss")
HEAD = (1, 2)


@pytest.fixture(autouse=True)
def _in_double(monkeypatch, request):
    if "gpt_oss" not in request.node.name:  # whose experts know no float64
        exact(monkeypatch)


def losses(model, batch):
    with torch.no_grad():
        return losses_of_logits(model(**batch).logits, batch["input_ids"])


def measured(model, batch, changes, **options):
    """Measured costs of changes of one head, by name."""
    rows = kq.ablate(model, [batch], changes=changes, means="global", measure="all", samples=1, **options).rows
    return {row["part"]: row for row in rows}


def assert_costs(row, model, batch, after, limit=1e-9):
    before, limit = losses(model, batch), 1e-5 if next(model.parameters()).dtype == torch.float32 else limit
    assert row["change"] == pytest.approx(float((after - before).mean()), abs=limit)
    assert row["evidence"] == "measured"


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_those_of_the_dial(name):
    model, batch = decoder(name), text(rows=4)
    placed = any(site.placed for site in sites_of(model).values())
    parts = ["symmetric", "skew", "popularity", *(["query_only", "position"] if placed else [])]
    sets = {part: {part: 0.0} for part in parts}
    sets |= {f"only {part}": {other: 0.0 for other in parts if other != part} for part in parts}
    sets["only symmetric + skew"] = dict.fromkeys(parts[2:], 0.0)
    rows = measured(model, batch, list(sets), heads=[HEAD])
    assert list(rows) == list(sets)
    for change, gains in sets.items():
        with kq.dial(model, **gains, heads=[HEAD], data=[batch], means="global"):
            after = losses(model, batch)
        assert_costs(rows[change], model, batch, after)
    assert max(abs(row["change"]) for row in rows.values()) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_heads_off_are_those_of_ablate_heads(name):
    model, batch = decoder(name), text(rows=4)
    rows = measured(model, batch, ["zero", "mean"], heads=[HEAD])
    for kind, row in rows.items():
        with kq.ablate_heads(model, kind, [HEAD], data=[batch]):
            after = losses(model, batch)
        assert_costs(row, model, batch, after)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_forms_are_those_of_project(name):
    model, batch = decoder(name), text(rows=4)
    forms = {f"form {kernel}": (kernel, None) for kernel in ("symmetric", "psd", "skew", "split")}
    forms["form rank 4"] = ("general", 4)
    rows = measured(model, batch, list(forms), heads=[HEAD])
    for change, (kernel, rank) in forms.items():
        with kq.project(model, HEAD, kernel, rank):
            after = losses(model, batch)
        assert_costs(rows[change], model, batch, after)


@pytest.mark.parametrize("kind", ["singular", "symmetric", "skew"])
@pytest.mark.parametrize("on", ["weights", "data"])
def test_directions_are_those_of_the_dial(kind, on):
    model, batch = decoder("llama"), text(rows=8)
    suffix = " on data" if on == "data" else ""
    rows = measured(model, batch, [f"{kind} directions 2{suffix}", f"{kind} direction 1{suffix}"], heads=[HEAD])
    assert [row["direction"] for row in rows.values()] == [0, 1]
    data = {"data": [batch], "means": "global"} if on == "data" else {}
    form = kq.read(model)[HEAD[0]].head(HEAD[1]).to(torch.float64)
    values = {
        "singular": form.singular_values(),
        "symmetric": form.symmetric_eigenvalues(),
        "skew": form.skew_values()[::2],  # each plane has two
    }[kind]
    values = values[values.abs().argsort(descending=True)]
    shares = values.square() / values.square().sum()
    for number, row in enumerate(rows.values()):
        with kq.dial(model, directions={HEAD: [number]}, of=kind, on=on, **data):
            after = losses(model, batch)
        assert_costs(row, model, batch, after)
        if on == "weights":
            assert row["value"] == pytest.approx(float(values[number]))
            assert row["share"] == pytest.approx(float(shares[number]))


def replaced(model, batch, site, name, function):
    """Losses with one tensor of the calls of a layer replaced."""
    module = sites_of(model)[site].module
    with kq.listen(model, lambda call: {name: function(call)} if call.module is module else None):
        return losses(model, batch)


def by_hand(call, head, allowed, uniform=False):
    """The output of one head, query by query, with the keys that `allowed` keeps of those that it sees."""
    out = call.output().clone()
    scores = call.scores()[:, head]
    for row in range(len(out)):
        for query in range(out.shape[2]):
            keys = [
                key for key in range(scores.shape[-1]) if scores[row, query, key] > -math.inf and allowed(query, key)
            ]
            weights = [1.0 if uniform else math.exp(float(scores[row, query, key])) for key in keys]
            total = sum(weights)
            if call.sinks is not None and not uniform:
                total += math.exp(float(call.sinks[head]))
            values = call.values()[row, head]
            out[row, head, query] = sum(w / total * values[key] for w, key in zip(weights, keys, strict=True))
    return out


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "gpt_oss"])
def test_windows_and_uniform_attention_are_those_by_hand(name):
    model, batch = decoder(name), text(rows=3)
    ways = {
        "uniform": lambda query, key: True,
        "window 2": lambda query, key: query - key < 2,
        "window 2 + first": lambda query, key: query - key < 2 or key == 0,
        "window 1": lambda query, key: query == key,
    }
    rows = measured(model, batch, list(ways), heads=[HEAD])
    for change, allowed in ways.items():
        uniform = change == "uniform"
        dtype = next(model.parameters()).dtype

        def changed(call, allowed=allowed, uniform=uniform, dtype=dtype):
            return by_hand(call, HEAD[1], allowed, uniform).to(dtype)

        after = replaced(model, batch, HEAD[0], "output", changed)
        assert_costs(rows[change], model, batch, after)


def test_a_window_of_a_bidirectional_model_has_two_sides():
    model = kq.Encoder(8, depth=1, heads=2).double().eval()
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    with torch.no_grad():
        before = model(x)
    module = sites_of(model)[0].module

    def near(call):
        return {"output": by_hand(call, 1, lambda query, key: abs(query - key) < 2)} if call.module is module else None

    with torch.no_grad(), kq.listen(model, near):
        after = model(x)
    change = (after - before).flatten(1).square().sum(1) / before.flatten(1).square().sum(1)
    [row] = kq.ablate(model, [{"x": x}], changes="window 2", heads="0.1", measure="all").rows
    assert row["change"] == pytest.approx(float(change.mean()), rel=1e-9)


def rounded(x, bits, dim):
    """Plain rounding of a vector or a column to 2^bits levels between its least and largest value."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return low + step * torch.round((x - low) / step)


def angles_of(model, length, width):
    """Cosine and sine of llama's rotation, by its definition."""
    base = model.config.rope_parameters["rope_theta"]
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@pytest.mark.parametrize(
    ("change", "bits", "dim", "turned"),
    [
        ("keys 4", 4, -1, False),
        ("keys 2", 2, -1, False),
        ("keys 3 per channel", 3, -2, False),
        ("keys 3 rotated", 3, -1, True),
        ("values 2", 2, -1, False),
        ("values 3 per channel rotated", 3, -2, True),
    ],
)
def test_quantised_keys_and_values_are_those_by_hand(change, bits, dim, turned):
    """Of one key head, whose two heads change together."""
    model, batch = decoder("llama"), text(rows=4)
    name = "value" if change.startswith("values") else "key"

    def stored(call):
        x = getattr(call, name).clone()
        turn = hadamard(x.shape[-1]).double() if turned else torch.eye(x.shape[-1], dtype=torch.float64)
        x[:, 1] = rounded(x[:, 1] @ turn, bits, dim) @ turn.mT
        return x

    row = measured(model, batch, change, heads="1.2")[change]
    assert (row["layer"], row["head"], row["key_head"]) == (1, None, 1)
    assert_costs(row, model, batch, replaced(model, batch, 1, name, stored))
    assert abs(row["change"]) > 1e-6


def test_the_mean_key_before_rope_is_stored_apart():
    model, batch = decoder("llama"), text(rows=4)

    def stored(call):
        x, [cos, sin] = call.key.clone(), angles_of(model, call.key.shape[-2], call.key.shape[-1])
        plain = rotated(x[:, 1], cos, -sin)
        mean = rotated(plain.mean((0, 1)).expand_as(plain), cos, sin)
        x[:, 1] = rounded(x[:, 1] - mean, 3, -1) + mean
        return x

    change = "keys 3 mean apart"
    row = measured(model, batch, change, heads="1.3")[change]
    assert_costs(row, model, batch, replaced(model, batch, 1, "key", stored), limit=1e-6)  # float32 angles in the model
    plain = measured(model, batch, "keys 3", heads="1.3")["keys 3"]
    assert row["change"] != pytest.approx(plain["change"], rel=1e-3)


def test_padding_sets_no_range_of_a_channel_and_constants_are_kept():
    x, quantiser = torch.randn(2, 3, 5, 4), Quantiser(4, per_channel=True)
    padded = x.clone()
    padded[1, :, 3:] = 1e3
    whole = quantiser(padded, torch.tensor([[True] * 5, [True] * 3 + [False] * 2]))
    torch.testing.assert_close(whole[1, :, :3], quantiser(x[1:, :, :3])[0])
    torch.testing.assert_close(whole[0], quantiser(x[:1])[0])
    assert torch.equal(Quantiser(4)(torch.full((1, 1, 2, 3), 0.3)), torch.full((1, 1, 2, 3), 0.3))


@pytest.mark.parametrize("width", [1, 12, 64])
def test_hadamard_blocks_are_orthogonal_and_flat(width):
    matrix, size = hadamard(width).double(), width & -width
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(width, dtype=torch.float64), atol=1e-6, rtol=0)
    blocks = torch.block_diag(*[torch.full((size, size), size**-0.5)] * (width // size))
    torch.testing.assert_close(matrix.abs(), blocks.double(), atol=1e-6, rtol=0)


def test_a_function_of_the_call_is_a_change():
    model, batch = decoder("llama"), text(rows=4)

    def halved(call):
        return call.output() / 2

    row = measured(model, batch, [halved, "zero"], heads=[HEAD])["halved"]

    def half(call):
        out = call.output().clone()
        out[:, HEAD[1]] /= 2
        return out

    assert_costs(row, model, batch, replaced(model, batch, HEAD[0], "output", half))
    with pytest.raises(
        ValueError, match=r"change 'narrow' must return the output of all heads \(4, 4, 6, 8\), got \(4, 4\)"
    ):
        kq.ablate(model, [batch], changes={"narrow": lambda call: call.output()[..., 0, 0]}, measure="none")
