"""What a head carries from each token: the norm ‖W_O(W_V x + b_V)‖ of its values after the output projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor, nn

from keyquery.checkpoints import read
from keyquery.checkpoints.sources import bare
from keyquery.layers import Attention
from keyquery.listening.call import Call
from keyquery.support.printable import first_line


@dataclass(frozen=True, eq=False)
class OutputMaps:
    """Output projections of a model's heads (…, r, width) by the name of the attention module, or why there are none.

    `kq.Attention` layers are used directly; weights of other models are read as in `kq.read`.
    """

    maps: Mapping[str, Float[Tensor, "key_heads group r width"]] = field(default_factory=dict)
    reason: str | None = None

    @classmethod
    def of(cls, model: nn.Module) -> OutputMaps:
        """Those of a live model."""
        model = bare(model)
        layers = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
        if layers:
            return cls({name: _of_layer(layer) for name, layer in layers.items()})
        try:
            heads = read(model)
            return cls({layer.name: heads.values(layer.index).output for layer in heads if layer.kind == "self"})
        except (ValueError, TypeError, KeyError) as error:
            return cls(reason=first_line(error))

    def norms(self, call: Call) -> Float[Tensor, "batch heads m"] | None:
        """Norms for every key of a call, 0 for padding; None if its output projection is not known."""
        output = self._near(call.name)
        if output is None or call.value is None or output.shape[2] != call.value.shape[-1]:
            return None
        key_heads = call.value.shape[1]
        if output.shape[0] * output.shape[1] != call.heads:
            return None
        by_key_head = output.flatten(0, 1).unflatten(0, (key_heads, -1)).to(call.value.device)
        norms = lengths(call.value.unsqueeze(2), by_key_head).flatten(1, 2)
        return norms if call.real is None else norms.where(call.real[:, None].to(norms.device), 0.0)

    def _near(self, module: str) -> Tensor | None:
        """The output projection of the attention that a module is, contains, or is part of."""
        for name, output in self.maps.items():
            if name == module or f"{module}.".startswith(f"{name}.") or f"{name}.".startswith(f"{module}."):
                return output
        return None


def _of_layer(layer: Attention) -> Float[Tensor, "key_heads group r width"]:
    return layer.output.weight.detach().mT.unflatten(0, (layer.kv_heads, -1, layer.head_dim))


def lengths(value: Float[Tensor, "*batch n r"], output: Float[Tensor, "*heads r width"]) -> Float[Tensor, "*both n"]:
    """‖v W‖ of values v and output maps W, through the r × r matrix W Wᵀ, in float64."""
    value, output = value.double(), output.double()
    return ((value @ (output @ output.mT)) * value).sum(-1).clamp(min=0).sqrt()
