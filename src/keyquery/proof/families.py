"""`check_family`: equivalence test of the forms read from a file against the scores of the reference model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keyquery.checkpoints import Heads, Layer, read
from keyquery.checkpoints.family import families
from keyquery.listening.call import Call
from keyquery.listening.hooks import on_input
from keyquery.listening.listen import listen
from keyquery.support.extras import optional

# Architectures that do not use the attention interface of transformers: their attention maps are compared instead.
BYPASS = ("bloom", "deberta_v2", "falcon", "gpt_neo", "gptj")
TOLERANCE = 1e-5


def check_family(name: str, **changes: Any) -> None:
    """Build a tiny random model of an architecture with transformers, save it, read it, and compare all scores.

    The q·k that the model itself computes, at position 0 and at real offsets, must equal the scores of our Form to a
    relative error of 1e-5. Needs the extra `hf`.

    Parameters
    ----------
    name
        The architecture, as its file is called.
    **changes
        Values put into the tiny model's config.

    Raises
    ------
    AssertionError
        If a score differs.

    Examples
    --------
    >>> kq.testing.check_family("bert")
    """
    model = tiny_model(name, **changes)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        on_disk = read(folder)
        assert on_disk.family.name == name, f"{name} is read as {on_disk.family.name}"
        _compare(model, on_disk, at_zero=False)
        if on_disk[-1].rope is not None and name not in BYPASS:
            _compare(model, on_disk, at_zero=True)


def tiny_model(name: str, **changes: Any) -> Any:
    """The tiny model of an architecture with random weights, including biases and gains."""
    facts = families()[name].tiny
    cls = getattr(optional("transformers", "check_family"), changes.pop("model", facts["model"]))
    config = cls.config_class(**{**facts["config"], **changes}, attn_implementation="eager")
    model = cls(config).eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            noise = 0.3 * torch.randn_like(parameter)
            parameter.copy_(1 + noise if "norm" in label.lower() and "weight" in label else noise)
            if any(part in label for part in facts.get("zero", [])):
                parameter.zero_()
    return model


def tiny_inputs(name: str, model: Any) -> dict[str, Tensor]:
    """Inputs of the tiny model."""
    ids, image = {"input_ids": torch.randint(3, 60, (1, 6))}, {"pixel_values": torch.randn(1, 3, 16, 16)}
    decoder = {"decoder_input_ids": torch.randint(3, 60, (1, 5))}
    match families()[name].tiny.get("inputs", "text"):
        case "pair":
            return {**ids, **decoder}
        case "audio":
            frames = 2 * model.config.max_source_positions
            return {"input_features": torch.randn(1, model.config.num_mel_bins, frames), **decoder}
        case "wave":
            return {"input_values": torch.randn(1, 120)}
        case "image":
            return image
        case "text and image":
            return {**ids, **image}
        case _:
            return ids


def _compare(model: Any, on_disk: Heads, at_zero: bool) -> None:
    name, in_memory = on_disk.family.name, read(model)
    inputs = tiny_inputs(name, model)
    if at_zero:
        inputs["position_ids"] = torch.zeros_like(inputs["input_ids"])
    hidden = {layer.modules.get("fused") for layer in in_memory if "module" in layer.modules}  # parameters, no modules
    watched = sorted({name for layer in in_memory for name in layer.modules.values()} - hidden)
    with _spied(model, name) as calls, _recorded(model, watched) as seen, torch.no_grad():
        out = model(**inputs, **({"output_attentions": True} if name in BYPASS else {}))
    assert calls or name in BYPASS, f"{name} shows no attention call"
    kernels = list(zip(on_disk, in_memory, strict=True))
    maps = iter(out.attentions) if name in BYPASS else None
    while kernels:
        # The scores of the two kernels of an MLA head add up.
        together = [kernels.pop(0) for _ in range(2 if "(nope)" in kernels[0][0].name else 1)]
        layer, live = together[0]
        x, y = _entering(live, seen)
        scores = torch.stack([_scores(disk, x, y, at_zero) for disk, _ in together]).sum(0)
        if maps is not None:
            _close(layer.name, _softmax(scores, layer, on_disk), next(maps)[0])
        elif (call := calls.get(_owner(live))) is not None:
            _close(layer.name, scores, call)
        for disk, _ in together:
            if disk.query_norm is None or disk.query_norm.shift is None:
                _check_forms(disk, x, y, at_zero)
        _check_feeding_norm(layer, live, x, y, seen)


def _scores(layer: Layer, x: Tensor, y: Tensor, at_zero: bool) -> Tensor:
    """Scaled scores (heads, n, m) from the queries and keys that a layer makes of tokens."""
    query, key = layer.project(x, y)
    if layer.rope is not None:
        places = [torch.arange(t.shape[-2]) * (0 if at_zero else 1) for t in (query, key)]
        query, key = (layer.rope.rotate(t, index) for t, index in zip((query, key), places, strict=True))
    return layer.scale * (query @ key.mT).flatten(0, 1)


def _check_forms(layer: Layer, x: Tensor, y: Tensor, at_zero: bool) -> None:
    """The Forms give the same scores: `biased` on the layer's input, `folded` on that input before gain and shift.

    QK-norm divides queries and keys by factors that no form contains: they are multiplied back here. Query-only terms
    are not in folded forms, since softmax ignores them: they are removed from both.
    """
    expected = _scores(layer, x, y, at_zero)
    sizes = [
        torch.linalg.vector_norm(bare, dim=-1) / torch.linalg.vector_norm(used, dim=-1)
        for bare, used in zip(layer.gained().apply(x, y), layer.project(x, y), strict=True)
    ]
    expected = expected * (sizes[0].unsqueeze(-1) * sizes[1].unsqueeze(-2)).flatten(0, 1)
    for view, (a, b) in (("biased", (x, y)), ("folded", _before_norm(layer, x, y))):
        form = getattr(layer, view)
        a, b = (torch.nn.functional.pad(t, (0, form.dim - t.shape[-1]), value=1.0) for t in (a, b))
        offsets = range(1 - len(a), len(b))
        by_offset = {d: form if layer.rope is None else form.at(0 if at_zero else d, layer.rope) for d in offsets}
        given = torch.stack([by_offset[j - i].scores(a[i], b[j]) for i in range(len(a)) for j in range(len(b))], dim=-1)
        given_scores, wanted = layer.scale * given.reshape(expected.shape), expected
        if view == "folded" and layer.key_norm is None:
            given_scores, wanted = (scores - scores[..., :1] for scores in (given_scores, wanted))
        _close(f"{layer.name}, {view}", given_scores, wanted)


def _before_norm(layer: Layer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The input of the layer, with shift and gain of the preceding norm removed."""

    def undo(t: Tensor, norm: Any) -> Tensor:
        if norm is None:
            return t
        return (t if norm.shift is None else t - norm.shift) / norm.gain

    return undo(x, layer.norm), undo(y, layer.memory_norm if layer.kind == "cross" else layer.norm)


def _check_feeding_norm(
    layer: Layer, live: Layer, x: Tensor, y: Tensor, seen: dict[str, tuple[Tensor, Tensor]]
) -> None:
    """Check that the folded norm reproduces the input of the layer: kind, gain, shift and epsilon."""
    feeding = live.modules.get("norm", live.modules.get("first_norm"))
    for norm, module, entered in ((layer.norm, feeding, x), (layer.memory_norm, live.modules.get("memory_norm"), y)):
        if norm is not None and module in seen and not layer.notes:
            _close(f"what {module} gives to {layer.name}", norm(seen[module][0]), entered)


def _entering(live: Layer, seen: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The tokens that entered the query and the key projection."""
    names = live.modules
    query = next(names[role] for role in ("query", "query_down", "module", "fused") if role in names)
    key = next(names[role] for role in ("key", "key_down", "module", "fused") if role in names)
    return seen[query][0], seen[key][1]


def _owner(live: Layer) -> str:
    return live.name.removesuffix(" (nope)").removesuffix(" (rope)")


def _softmax(scores: Tensor, layer: Layer, heads: Heads) -> Tensor:
    n = scores.shape[-1]
    offsets = torch.arange(n) - torch.arange(n)[:, None]
    bias = heads.position_bias(layer, offsets.flatten())
    scores = scores if bias is None else scores + bias.reshape(-1, n, n).to(scores.dtype)
    return (scores.masked_fill(offsets > 0, -torch.inf) if layer.causal else scores).softmax(-1)


def _close(name: str, given: Tensor, expected: Tensor) -> None:
    assert given.shape == expected.shape, f"{name}: shape {tuple(given.shape)}, not {tuple(expected.shape)}"
    error = float((given - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    assert error <= TOLERANCE, f"{name}: the model's scores differ by {error:.2g}"


@contextmanager
def _spied(model: Any, name: str) -> Iterator[dict[str, Tensor]]:
    """Record scaled q·k of every attention module, by its name."""
    calls: dict[str, Tensor] = {}

    def note(call: Call) -> None:
        if call.scale is not None:
            calls.setdefault(call.name, call.scale * (call.query @ call.keys().mT)[0])

    with ExitStack() if name in BYPASS else listen(model, note):
        yield calls


@contextmanager
def _recorded(model: Any, modules: list[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """What enters modules, of the first and only sequence, by name; of attention, tokens of queries and of keys."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def record(label: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        entered = [*args, *kwargs.values()]
        both = entered[:2] if isinstance(module, nn.MultiheadAttention) else [entered[0], entered[0]]
        query, key = (tokens.reshape(-1, tokens.shape[-1]) for tokens in both)
        seen.setdefault(label, (query, key))

    with ExitStack() as stack:
        for label in modules:
            on_input(model.get_submodule(label), partial(record, label), stack)
        yield seen
