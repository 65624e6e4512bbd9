"""The norm that feeds each attention layer: what a running model normed, against the norm that is read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from keyquery.checkpoints import Layer
from keyquery.checkpoints.layer import Norm
from keyquery.checkpoints.positions.notes import UNFOLDED
from keyquery.listening.softmaxes import Capture, ModuleCall
from keyquery.proof.compare import Comparison
from keyquery.proof.tokens import entered

TOLERANCE = 1e-5
OTHER = "its norm is not what makes its tokens"


def norm_errors(compared: Comparison, model: nn.Module, capture: Capture) -> Iterator[tuple[str, str]]:
    """Layers whose norm is not the one that made their tokens in a run, each with what is wrong.

    A norm feeds a layer if what it returned is what entered the layer's projections. Where nothing else happens to the
    residual stream in between, scores of the folded forms are those of the model.
    """
    norms = {name for name, module in model.named_modules() if _is_norm(module)}
    called = ((call, name) for name in norms for call in capture.calls.get(name, []))
    calls = [(call, name) for call, name in called if call.inputs and call.out is not None]
    calls.sort(key=lambda row: -row[0].time)
    for name, layers in compared.groups.items():
        for which, (module, norm) in enumerate(zip(compared.modules[name], _norms_of(layers[0]), strict=True)):
            if layers[0].learned and which == 0:
                continue
            entries = ((call, entered(capture, module, call.time + 1, which)) for call in capture.calls.get(module, []))
            errors = {_error(tokens, norm, call, calls) for call, tokens in entries if tokens is not None}
            if None in errors or UNFOLDED in layers[0].notes:  # a block may be used twice, and fed by different norms
                continue
            yield from ((name, str(why)) for why in errors)


def _norms_of(layer: Layer) -> tuple[Norm | None, Norm | None]:
    return layer.norm, layer.memory_norm if layer.kind == "cross" else layer.norm


def _error(tokens: Tensor, norm: Norm | None, entry: ModuleCall, calls: list[tuple[ModuleCall, str]]) -> str | None:
    """What is wrong with the norm of tokens that entered a projection; the latest norm that returned them made them."""
    earlier = [(call, name) for call, name in calls if call.time < entry.time]
    call, name = next(((call, name) for call, name in earlier if _same_tokens(call.out, tokens)), (None, ""))
    if call is None:  # or what the norm returned was multiplied by a factor, which the norm that is read has
        return None if norm is None or any(_makes(norm, call, tokens) for call, _ in earlier) else OTHER
    if norm is None:
        return f"the norm {name} that makes its tokens is not read"
    assert call.out is not None
    if norm.gain.shape[-1] != call.out.shape[-1]:
        return f"its norm has another width than {name}"
    error = (norm(call.inputs[0]) - call.out).abs().max() / call.out.abs().max()
    return None if error <= TOLERANCE else f"its norm differs by {float(error):.2g} from {name}"


def _makes(norm: Norm, call: ModuleCall, tokens: Tensor) -> bool:
    """Whether a norm makes these tokens of what another was given."""
    return norm.gain.shape[-1] == call.inputs[0].shape[-1] and _same_tokens(norm(call.inputs[0]), tokens)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module norms each token by itself, with a gain."""
    kind, parameters = type(module).__name__.lower(), list(module.parameters(recurse=False))
    named = "norm" in kind and not any(word in kind for word in ("batch", "group", "instance"))
    return named and bool(parameters) and all(parameter.ndim == 1 for parameter in parameters)


def _same_tokens(out: Tensor | None, tokens: Tensor) -> bool:
    """Whether the tokens are of those that a norm returned: in any order, some of them, or with padding of zeros."""
    if out is None or out.shape[-1] != tokens.shape[-1]:
        return False
    normed, entering = _marks(out), _marks(tokens)
    if len(normed) == 0 or len(entering) == 0:
        return False
    above = torch.searchsorted(normed, entering).clamp(max=len(normed) - 1)
    nearest = torch.minimum((normed[above] - entering).abs(), (normed[above - 1] - entering).abs())
    return bool((nearest <= 1e-6 * normed.abs().amax()).all())


def _marks(tokens: Tensor) -> Float64[Tensor, " tokens"]:
    """A random projection of every token that is not zero, in order of size."""
    rows = tokens.reshape(-1, tokens.shape[-1]).double()
    rows = rows[rows.abs().amax(1) > 0]
    direction = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return (rows @ direction).sort().values
