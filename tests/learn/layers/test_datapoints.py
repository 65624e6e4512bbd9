"""Attention between datapoints: what it may depend on, and what it must find."""

import pytest
import torch

import keyquery as kq
from keyquery.learn.inputs.tables import Rows
from keyquery.learn.layers import AttributeAttention, DatapointEncoder
from keyquery.learn.npt.network import TableNetwork

SIZES = (0, 3, 0, 2, 0)


def rows_of(sizes, batch=2, n=12, seed=0, hidden=0.2):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.stack([torch.randint(max(size, 1), (batch, n), generator=generator) for size in sizes], -1)
    values = torch.randn(batch, n, len(sizes), generator=generator)
    return Rows(values, codes, torch.rand(batch, n, len(sizes), generator=generator) < hidden)


def said(network, rows, **options):
    """All that a network says of every entry."""
    h = network(*rows, **options)
    parts = [
        network.logits(h[..., column, :], column) if size else network.numbers(h[..., column, :], column).unsqueeze(-1)
        for column, size in enumerate(network.sizes)
    ]
    return torch.cat(parts, -1)


def network(rows="full", published=False, kernel="general", sizes=SIZES, **options):
    torch.manual_seed(1)
    made = TableNetwork(sizes, 8, 4, 2, rows=rows, published=published, kernel=kernel, points=5, **options)
    for weight in made.parameters():  # a fresh residual is the identity, and would hide what is wrong with it
        weight.data += torch.randn_like(weight) / 20
    return made.eval()


# The layers against their definition


def plain(block, x, published):
    """The block by hand, with a matrix of scores, for kernel "general"."""
    norm = torch.nn.functional.layer_norm
    gains = block.attention_norm
    normed = norm(x, x.shape[-1:], gains.weight, gains.bias, gains.eps)
    source, own = x if published else normed, block.attention
    query, key, value = own.query(normed), own.key(source), own.value(source)
    width, heads = x.shape[-1], []
    for head in range(own.heads):
        mine = slice(head * own.head_dim, (head + 1) * own.head_dim)
        scores = query[..., mine] @ key[..., mine].mT / (width if published else own.head_dim) ** 0.5
        heads.append(scores.softmax(-1) @ value[..., mine])
    r = block.residual(x) + own.output(torch.cat(heads, -1))
    return r + block.mlp(norm(r, r.shape[-1:], block.mlp_norm.weight, block.mlp_norm.bias, block.mlp_norm.eps))


@pytest.mark.parametrize("published", [False, True])
def test_both_layers_are_their_definition(published):
    x = torch.randn(2, 7, 3, 8).double()
    between = kq.DatapointAttention(3, 8, heads=4, published=published).double()
    within = AttributeAttention(8, heads=4, published=published).double()
    for layer in (between, within):
        for weight in layer.parameters():
            weight.data += torch.randn_like(weight) / 10
    found = torch.stack([plain(between.block, table.flatten(1), published) for table in x]).unflatten(2, (3, 8))
    assert torch.allclose(between(x), found, atol=1e-10)
    found = torch.stack([torch.stack([plain(within.block, row, published) for row in table]) for table in x])
    assert torch.allclose(within(x), found, atol=1e-10)


def test_what_published_says_is_all_that_differs():
    old, new = kq.DatapointAttention(3, 8, 2, published=True), kq.DatapointAttention(3, 8, 2)
    assert (old.block.attention.scale, new.block.attention.scale) == (24**-0.5, 12**-0.5)
    assert (old.block.mlp_norm.eps, new.block.mlp_norm.eps) == (1e-12, 1e-5)
    assert torch.equal(new.block.residual.weight, torch.eye(24))
    assert not torch.equal(old.block.residual.weight, torch.eye(24))
    assert sum(w.numel() for w in old.parameters()) == sum(w.numel() for w in new.parameters())


@pytest.mark.parametrize("rows", ["full", "induced"])
def test_all_of_a_layer_is_of_the_dtype_and_device_that_is_asked_for(rows):
    layer = kq.DatapointAttention(3, 8, 2, kernel="symmetric", rows=rows, dtype=torch.float64)
    assert {weight.dtype for weight in layer.parameters()} == {torch.float64}
    assert layer(torch.randn(1, 4, 3, 8, dtype=torch.float64)).dtype == torch.float64
    layer = kq.DatapointAttention(3, 8, 2, rows=rows, device="meta")
    assert {weight.device.type for weight in layer.parameters()} == {"meta"}


@pytest.mark.parametrize("dropped", [False, True])
def test_layers_computed_again_in_backward_give_the_same_gradients(dropped):
    one, other = (network(dropout=0.3).train(dropped) for _ in range(2))
    other.encoder.thrifty = True
    rows = rows_of(SIZES)
    for each in (one, other):
        torch.manual_seed(0)
        said(each, rows).square().mean().backward()
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: kq.DatapointAttention(3, 8, 5),
            "heads must divide dim unless head_dim is set: 5 does not divide 24",
        ),
        (lambda: kq.DatapointAttention(0, 8, 2), "columns must be at least 1, got 0"),
        (lambda: kq.DatapointAttention(3, 8, 2, rows="ful"), "rows must be one of 'full', 'induced', got 'ful'; did"),
        (lambda: kq.DatapointAttention(3, 8, 2, rows="induced", points=0), "points must be at least 1, got 0"),
        (lambda: kq.DatapointAttention(3, 8, 2, rope=kq.Rope(4)), "rope must be None for attention between"),
        (lambda: kq.DatapointAttention(3, 8, 2, kv_heads=1), "kv_heads must be None for attention between"),
        (lambda: DatapointEncoder(3, 8, 0, 2), "depth must be at least 1, got 0"),
        (
            lambda: kq.DatapointAttention(3, 8, 2)(torch.zeros(1, 5, 2, 8)),
            r"x must be \(batch, n, 3, 8\), got \(1, 5, 2",
        ),
    ],
)
def test_bad_input_is_told(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# What a network may depend on


@pytest.mark.parametrize(("rows", "published", "kernel"), [("full", True, "general"), ("induced", False, "rbf")])
def test_the_order_of_rows_does_not_matter(rows, published, kernel):
    made, table = network(rows, published, kernel), rows_of(SIZES)
    order = torch.randperm(12)
    turned = Rows(*(part[:, order] for part in table))
    assert (said(made, turned) - said(made, table)[:, order]).abs().max() <= 1e-4
    assert (said(made, table)[:, order] - said(made, table)).abs().max() > 0.1  # or there is nothing to turn


@pytest.mark.parametrize("rows", ["full", "induced"])
@pytest.mark.parametrize("published", [False, True])
def test_what_is_hidden_changes_exactly_nothing(rows, published):
    made, table = network(rows, published), rows_of(SIZES)
    values, codes = table.values.clone(), table.codes.clone()
    values[table.hidden], codes[table.hidden] = 99.0, 99
    assert torch.equal(said(made, Rows(values, codes, table.hidden)), said(made, table))
    assert not torch.equal(said(made, Rows(table.values + 1, table.codes, table.hidden)), said(made, table))


@pytest.mark.parametrize("rows", ["full", "induced"])
@pytest.mark.parametrize(("published", "kernel"), [(True, "general"), (False, "rbf")])
def test_later_rows_see_the_context_and_themselves_alone(rows, published, kernel):
    made = network(rows, published, kernel)
    context, later = rows_of(SIZES, batch=1, n=9), rows_of(SIZES, batch=1, n=4, seed=1)
    memories = made.memories(context)
    together = said(made, later, memories=memories)
    for place in range(4):
        alone = Rows(*(part[:, place : place + 1] for part in later))
        assert torch.allclose(said(made, alone, memories=memories), together[:, place : place + 1], atol=1e-5)
    if rows == "full":  # one row more, which sees all of them, is a row of the table that none of them sees
        attention = made.encoder.layers[0].block.attention
        x, y = torch.randn(1, 9, 40), torch.randn(1, 1, 40)
        seen, fused = [], attention(torch.cat((x, y), 1))[:, -1:]
        assert torch.allclose(attention(y, memory=attention.memory(x), alone=True, seen=seen), fused, atol=1e-5)
        assert torch.allclose(seen[0].sum(-1), torch.ones(1, 1))
        both = []
        attention(torch.cat((x, y), 1), seen=both)
        assert torch.allclose(both[0][:, -1:], seen[0], atol=1e-6)


def test_points_carry_what_they_have_seen():
    layer = kq.DatapointAttention(3, 8, 2, rows="induced", points=4)
    x, later = torch.randn(1, 6, 3, 8), torch.randn(1, 2, 3, 8)
    taken, given = [], []
    layer(later, memory=layer.memory(x, taken), seen=given)
    assert (taken[0].shape, given[0].shape) == ((1, 4, 6), (1, 2, 4))
    assert torch.allclose((given[0] @ taken[0]).sum(-1), torch.ones(1, 2))
    with_points = layer(x)
    layer.block.attention.points.data += 1
    assert not torch.allclose(layer(x), with_points)


@pytest.mark.parametrize("published", [False, True])
def test_the_norm_is_folded_into_what_it_feeds(published):
    network = TableNetwork((0,) * 3, 8, 2, 2, published=published)
    block, x = network.encoder.layers[0].block, torch.randn(1, 10, 24)
    torch.nn.init.normal_(block.attention_norm.weight)
    torch.nn.init.normal_(block.attention_norm.bias)
    layer = kq.read(network)[0]
    normed = block.attention_norm(x)
    scores = block.attention.queries(normed) @ block.attention.memory(x if published else normed).key.mT
    plain = torch.nn.functional.layer_norm(x[0], (24,), eps=block.attention_norm.eps)
    ones = torch.ones(10, 1)
    query, key = (torch.cat((tokens, ones), 1) for tokens in (plain, x[0] if published else plain))
    found = query @ layer.folded.query.mT @ layer.folded.key @ key.mT
    seen = [given - given.mean(-1, keepdim=True) for given in (found, scores[0])]  # softmax sees no more
    assert torch.allclose(*seen, atol=1e-4)
    assert layer.kind == ("cross" if published else "self")


def test_long_tables_go_through_in_parts_and_columns_in_any_order(monkeypatch):
    layer, x, order = AttributeAttention(8, 2), torch.randn(2, 9, 5, 8), [3, 0, 4, 2, 1]
    whole = layer(x)
    monkeypatch.setattr("keyquery.learn.layers.datapoints.BATCH", 5)
    assert torch.allclose(layer(x), whole, atol=1e-6)
    assert torch.allclose(layer(x[:, :, order]), whole[:, :, order], atol=1e-5)
