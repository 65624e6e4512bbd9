"""`check_family`: equivalence test of the forms read from a file against the scores of the reference model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from keyquery.checkpoints import Layer, read
from keyquery.checkpoints.family import families
from keyquery.checkpoints.layer import Norm
from keyquery.listening.softmaxes import Capture, captured
from keyquery.proof.compare import Comparison
from keyquery.proof.proof import TOLERANCE, save
from keyquery.proof.tokens import entered
from keyquery.support.extras import optional


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
        save(model, folder)
        heads = read(folder)
        assert heads.family.name == name, f"{name} is read as {heads.family.name}"
        compared = Comparison(heads, model, Path(folder))
        for at_zero in (False, True) if heads[-1].rope is not None else (False,):
            _compare(model, compared, at_zero)


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


def _compare(model: Any, compared: Comparison, at_zero: bool) -> None:
    """Every softmax of a run against the scores read, and the forms and norms of every layer on its tokens."""
    inputs = tiny_inputs(compared.heads.family.name, model)
    if at_zero:
        inputs["position_ids"] = torch.zeros_like(inputs["input_ids"])
    with captured(model) as capture:
        capture.inputs = inputs
        model(**inputs)
    for match in compared.matches(capture, inputs["position_ids"][0] if at_zero else None):
        error = f"the model's scores differ by {match.error:.2g} {match.why}"
        assert match.error <= TOLERANCE and not match.why, f"{match.owner}: {error}"  # noqa: PT018
    unseen = compared.groups.keys() - compared.seen
    assert not unseen, f"{compared.heads.family.name} shows no attention of {sorted(unseen)}"
    for name, layers in compared.groups.items():
        x, y = (_entering(capture, module, which) for which, module in enumerate(compared.modules[name]))
        for layer in layers:
            if layer.query_norm is None or layer.query_norm.shift is None:
                _check_forms(layer, x, y, at_zero)
        _check_feeding_norm(layers[0], x, y, capture, compared.names)


def _entering(capture: Capture, module: str, which: int) -> Tensor:
    """The tokens that entered a projection first: later calls may be on other ones, such as distances."""
    call = capture.after(module, -1)
    tokens = None if call is None else entered(capture, module, call.time + 1, which)
    assert tokens is not None, f"{module} takes no tokens"
    return tokens.flatten(0, -2)


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
        a, b = (pad(t, (0, form.dim - t.shape[-1]), value=1.0) for t in (a, b))
        offsets = range(1 - len(a), len(b))
        by_offset = {d: form if layer.rope is None else form.at(0 if at_zero else d, layer.rope) for d in offsets}
        given = torch.stack([by_offset[j - i].scores(a[i], b[j]) for i in range(len(a)) for j in range(len(b))], dim=-1)
        given_scores, wanted = layer.scale * given.reshape(expected.shape), expected
        if view == "folded" and layer.key_norm is None:
            given_scores, wanted = (scores - scores[..., :1] for scores in (given_scores, wanted))
        _close(f"{layer.name}, {view}", given_scores, wanted)


def _before_norm(layer: Layer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The input of the layer, with shift and gain of the preceding norm removed."""

    def undo(t: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return t
        return (t if norm.shift is None else t - norm.shift) / norm.gain

    return undo(x, layer.norm), undo(y, layer.memory_norm if layer.kind == "cross" else layer.norm)


def _check_feeding_norm(layer: Layer, x: Tensor, y: Tensor, capture: Capture, names: Mapping[str, str]) -> None:
    """Check that the folded norm reproduces the input of the layer: kind, gain, shift and epsilon."""
    feeding = layer.modules.get("norm", layer.modules.get("first_norm"))
    for norm, module, tokens in ((layer.norm, feeding, x), (layer.memory_norm, layer.modules.get("memory_norm"), y)):
        call = capture.after(names.get(f"{module}.weight", ""), -1)
        if norm is not None and call is not None and not layer.notes:
            _close(f"what {module} gives to {layer.name}", norm(call.inputs[0].flatten(0, -2)), tokens)


def _close(name: str, given: Tensor, expected: Tensor) -> None:
    assert given.shape == expected.shape, f"{name}: shape {tuple(given.shape)}, not {tuple(expected.shape)}"
    error = float((given - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    assert error <= TOLERANCE, f"{name}: the model's scores differ by {error:.2g}"
