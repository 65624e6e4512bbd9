"""`check_kernel`: conformance test of an attention layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from jaxtyping import config
from torch import Tensor, nn

from keyquery.layers.cache import Cache

N = 12  # tokens of a trial
CAUSAL = (False, True)


def check_kernel(layer: Any, backend: str | None = "aot_eager") -> None:
    """Test a kq.Attention, or a layer with its signature; raises AssertionError with the property that fails.

    The structure that its kernel promises, as it is, with random parameters and after 100 steps of training; that
    causal attention never looks ahead, padding never leaks, tokens may be permuted where there are no positions,
    decoding with a cache equals the full pass, packed sequences equal single ones; gradients against finite
    differences; that the state can be saved, the layer compiled, and bfloat16 trusted.

    Parameters
    ----------
    layer
        The layer. One that is no softmax of scores names the checks that are meant for it in `promises`.
    backend
        Of torch.compile; None: the layer is not compiled, which is far quicker.

    Raises
    ------
    AssertionError
        With the property that fails.

    Examples
    --------
    >>> kq.testing.check_kernel(kq.Attention(8, heads=2, kernel="split"))
    """
    layer = copy.deepcopy(layer).to(torch.float64).eval()
    chosen = [check for check in CHECKS if check.__name__ in getattr(layer, "promises", [check.__name__])]
    if backend is not None:
        chosen.append(lambda layer: compiles(layer, backend))
    for check in chosen:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            check(copy.deepcopy(layer))


def structure(layer: Any) -> None:
    """Scores are symmetric, skew or positive as the kernel says, at equal and at different positions."""
    _structure(layer, "as given")
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.5)
    _structure(layer, "with random parameters")
    optimiser = torch.optim.AdamW(layer.parameters(), 1e-3)
    for _ in range(100):
        x = _tokens(layer)
        (layer(x) - x.roll(1, 1)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    _structure(layer, "after 100 steps of training")


def causal(layer: Any) -> None:
    """No gradient from a token's output to a later token."""
    x = _tokens(layer).requires_grad_()
    layer(x, is_causal=True)[:, 5].sum().backward()
    assert x.grad is not None
    assert x.grad[:, 6:].abs().max() == 0, "causal attention looks ahead"
    assert (x.grad[:, :6].abs().amax(-1) > 0).all(), "causal attention does not look back"


def padding(layer: Any) -> None:
    """Outputs of real tokens do not depend on padding, wherever it is; a row without keys is 0."""
    for x, real, is_causal in _padded(layer):
        noise = torch.where(real[..., None], x, torch.full_like(x, torch.nan))
        clean, dirty = (layer(t, mask=real, is_causal=is_causal) for t in (x, noise))
        _close(dirty[real], clean[real], 1e-6, "padding leaks")
    nothing = layer(x, mask=torch.zeros_like(real))
    assert nothing.abs().max() == 0, "a row that sees nothing is not 0"


def permutation(layer: Any) -> None:
    """Without positions, permuting tokens permutes outputs."""
    x = _tokens(layer)
    order = torch.randperm(N).to(x.device)
    if layer.rope is None:
        _close(layer(x[:, order]), layer(x)[:, order], 1e-9, "not equivariant to permutations")
    else:
        _close(layer(x[:, order], positions=order), layer(x)[:, order], 1e-9, "positions do not go with tokens")
        far = torch.arange(N, device=x.device) + 1000
        _close(layer(x, positions=far), layer(x), 1e-6, "scores depend on more than the offset")


def cached(layer: Any) -> None:
    """Decoding token by token, or in chunks, equals the full causal pass."""
    x = _tokens(layer)
    for sizes in ([1] * N, [5, 1, 6]):
        cache = Cache()
        parts = [layer(part, is_causal=True, cache=cache) for part in x.split(sizes, 1)]
        _close(torch.cat(parts, 1), layer(x, is_causal=True), 1e-9, "decoding with a cache differs")
        assert cache.length == N, "the cache lost tokens"


def packed(layer: Any) -> None:
    """Packed sequences give the same outputs as separate ones."""
    x = _tokens(layer)[0]
    offsets = torch.tensor([0, 3, 4, N], device=x.device)
    for is_causal in CAUSAL:
        alone = [layer(part[None], is_causal=is_causal)[0] for part in x.split(offsets.diff().tolist())]
        _close(layer(x, offsets=offsets, is_causal=is_causal), torch.cat(alone), 1e-9, "packed sequences differ")


def against_reference(layer: Any) -> None:
    """Outputs equal softmax(scores)·values with explicit scores; real tokens may also be given as pairs."""
    for x, real, is_causal in _padded(layer):
        expected = reference(layer, x, real, is_causal)[real]
        for mask in (real, real[:, None, :] & real[:, :, None]):
            _close(layer(x, mask, is_causal)[real], expected, 1e-9, "not its formula")


def gradients(layer: Any) -> None:
    """Backward equals finite differences, for inputs and parameters."""
    inputs = (_tokens(layer, n=4)[:1].requires_grad_(), *layer.parameters())
    torch.autograd.gradcheck(lambda x, *_: layer(x, is_causal=True), inputs, fast_mode=True)


def round_trip(layer: Any) -> None:
    """A state that is saved and loaded gives the same layer."""
    other, x = copy.deepcopy(layer), _tokens(layer)
    for weight in other.parameters():
        nn.init.normal_(weight)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)), "the state does not hold the whole layer"


def short_floats(layer: Any) -> None:
    """In bfloat16 no worse than twice a plain bfloat16 computation, and rounding."""
    short = copy.deepcopy(layer).to(torch.bfloat16)
    x = _tokens(short)
    truth = copy.deepcopy(short).to(torch.float64)(x.double(), is_causal=True)
    plain, given = reference(short, x, None, True), short(x, is_causal=True)
    budget = 2 * ((plain.double() - truth).abs().max() + truth.abs().max() * torch.finfo(torch.bfloat16).eps)
    _close(given.double(), truth, budget, "bfloat16 is off")


def compiles(layer: Any, backend: str) -> None:
    """The whole layer is one graph, and gives the same numbers."""
    layer = layer.float()
    x = _tokens(layer)
    torch._dynamo.reset()
    compiled: Any = torch.compile(layer, fullgraph=True, backend=backend)
    checked = not config.jaxtyping_disable
    config.update("jaxtyping_disable", True)  # shape checks cannot be traced
    try:
        for options in ({}, {"is_causal": True}, {"mask": _real(x)}):
            _close(compiled(x, **options), layer(x, **options), 1e-5, f"compiled with {options} it differs")
        if "cached" not in getattr(layer, "promises", ("cached",)):
            return
        cache = Cache()
        with torch.no_grad():
            parts = [compiled(part, is_causal=True, cache=cache) for part in x.split([5, 1, N - 6], 1)]
        _close(torch.cat(parts, 1), layer(x, is_causal=True), 1e-5, "compiled with a cache it differs")
    finally:
        config.update("jaxtyping_disable", not checked)


CHECKS: list[Callable[[Any], None]] = [structure, causal, padding, permutation, cached, packed, against_reference]
CHECKS += [gradients, round_trip, short_floats]


def scores(layer: Any, x: Tensor) -> Tensor:
    """Every score (batch, heads, n, n), before the scale, by its formula; −½‖q − k‖² for rbf."""
    query, key = layer.queries_and_keys(x)
    if layer.rope is not None:
        positions = torch.arange(x.shape[1], device=x.device)
        query, key = layer.rope.rotate(query, positions), layer.rope.rotate(key, positions)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    if layer.kernel == "rbf":
        return -(query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1) / 2
    return query @ key.mT


def reference(layer: Any, x: Tensor, real: Tensor | None, is_causal: bool) -> Tensor:
    """Attention with every score written out, in the precision of x."""
    value = layer.value(x).unflatten(-1, (layer.kv_heads, -1)).transpose(1, 2)
    value = value.repeat_interleave(layer.heads // layer.kv_heads, 1)
    visible = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
    visible = visible.tril() if is_causal else visible
    visible = visible if real is None else visible & real[:, None, None]
    weights = (scores(layer, x) * layer.scale).masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
    return layer.output((weights @ value).transpose(1, 2).flatten(2))


@torch.no_grad()
def _structure(layer: Any, when: str) -> None:
    matrix = scores(layer, _tokens(layer)[:1])[0]
    size = matrix.abs().max()
    sign = {"symmetric": 1, "psd": 1, "rbf": 1, "skew": -1}.get(layer.kernel)
    if sign is not None:
        word = "symmetric" if sign > 0 else "skew"
        _close(matrix, sign * matrix.mT, 1e-6 * size, f"not {word} {when}")
        _close(layer.form().symmetry, sign, 1e-6, f"its form is not {word} {when}")
    if layer.kernel == "psd" and layer.rope is None:
        assert torch.linalg.eigvalsh(matrix).min() > -1e-6 * size, f"not positive {when}"


def _tokens(layer: Any, n: int = N) -> Tensor:
    weight = next(layer.parameters())
    return torch.randn(2, n, layer.dim, dtype=weight.dtype).to(weight.device)


def _real(x: Tensor) -> Tensor:
    """Which tokens are real: the first of two sequences ends in four that are not."""
    return (torch.arange(N) < N - torch.tensor([[4], [0]])).to(x.device)


def _padded(layer: Any) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Tokens, which of them are real, and whether attention is causal."""
    x = _tokens(layer)
    for real, is_causal in product((_real(x), _real(x).flip(1)), CAUSAL):
        yield x, real, is_causal


def _close(given: Tensor, expected: Any, within: Any, complaint: str) -> None:
    worst = (given - expected).abs().max()
    assert worst <= within, f"{complaint}: by {worst:.2g}"
