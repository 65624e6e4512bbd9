"""The network of TabPFN v1: rows as tokens, labelled rows as the context that every row attends to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from keyquery.learn.layers.datapoints import Between, Memory

HEADS = 4  # of the released network; its weights do not show it
LAYERS = "transformer_encoder.layers."
RENAMED = {
    "self_attn.out_proj": "attention.output",
    "norm1": "attention_norm",
    "linear1": "mlp.0",
    "linear2": "mlp.2",
    "norm2": "mlp_norm",
}


def sizes_of(weights: Mapping[str, Tensor]) -> tuple[int, int, int, int, int]:
    """Columns, width, hidden width, depth and classes of a network, by its weights."""
    dim, columns = weights["encoder.weight"].shape
    hidden, classes = len(weights["decoder.0.weight"]), len(weights["decoder.2.weight"])
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    return columns, dim, hidden, depth, classes


class ContextLayer(nn.Module):
    """Post-norm layer: x = norm(x + attention(x)), then norm(x + mlp(x)); keys and values are those of the context."""

    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention = Between(dim, heads)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Float[Tensor, "batch n dim"], memory: Memory) -> Float[Tensor, "batch n dim"]:
        """Each row attends to the rows of the memory."""
        return self.mixed(x, self.attention(x, memory=memory))

    def mixed(self, x: Float[Tensor, "batch n dim"], attended: Tensor) -> Float[Tensor, "batch n dim"]:
        """The layer's output, from the output of its attention."""
        x = self.attention_norm(x + attended)
        return self.mlp_norm(x + self.mlp(x))


class ContextNetwork(nn.Module):
    """Logits of rows, given labelled rows: a transformer over rows without positions.

    context rows  x W + b + y v + c      attend to context rows
    other rows    x W + b                attend to context rows, never to each other
    """

    def __init__(self, columns: int, dim: int, hidden: int, depth: int, classes: int, heads: int = HEADS) -> None:
        super().__init__()
        self.columns, self.classes = columns, classes  # the most that a table may have
        self.encoder, self.label_encoder = nn.Linear(columns, dim), nn.Linear(1, dim)
        self.layers = nn.ModuleList(ContextLayer(dim, hidden, heads) for _ in range(depth))
        self.decoder = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, classes))

    def labelled(self, x: Float[Tensor, "batch n columns"], y: Tensor) -> Float[Tensor, "batch n dim"]:
        """Context rows as tokens; the class is a number."""
        return self.encoder(x) + self.label_encoder(y.to(x.dtype).unsqueeze(-1))

    def memories(self, x: Float[Tensor, "batch n columns"], y: Tensor) -> list[Memory]:
        """Keys and values of the context in every layer."""
        memories: list[Memory] = []
        context = self.labelled(x, y)
        for layer in self.layers:
            assert isinstance(layer, ContextLayer)
            memories.append(layer.attention.memory(context))
            if len(memories) < len(self.layers):
                context = layer(context, memories[-1])
        return memories

    def forward(self, x: Float[Tensor, "batch n columns"], memories: list[Memory]) -> Float[Tensor, "batch n classes"]:
        """Logits of rows that attend to the context."""
        x = self.encoder(x)
        for layer, memory in zip(self.layers, memories, strict=True):
            x = layer(x, memory)
        return self.decoder(x)


def read_network(path: Any) -> ContextNetwork:
    """The network of a safetensors file with the tensor names of the release, in float32."""
    if not isinstance(path, (str, Path)):
        raise TypeError(f"weights must be the path of a safetensors file, got {type(path).__name__}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}: weights must be the published ones, as safetensors")
    try:
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
        return network_of(tensors)
    except KeyError as error:
        raise ValueError(f"{path} does not hold the network of TabPFN v1: missing {error}") from None
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} does not hold the network of TabPFN v1: {str(error).splitlines()[0]}") from None


def network_of(tensors: Mapping[str, Tensor]) -> ContextNetwork:
    """The network of a released state dict; sizes are those of its tensors."""
    weights = {}
    for name, tensor in tensors.items():
        if name.startswith("criterion."):
            continue
        if "in_proj_" in name:
            layer, kind = name.removeprefix(LAYERS).split(".")[0], name.rsplit("_", 1)[1]
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                weights[f"layers.{layer}.attention.{part}.{kind}"] = piece.contiguous()
        else:
            weights[_renamed(name)] = tensor
    from keyquery.learn.base import filled  # needs scikit-learn, which a saved explanation does not

    sizes = sizes_of(weights)
    return filled(lambda: ContextNetwork(*sizes), weights, depth=sizes[3])


def _renamed(name: str) -> str:
    if not name.startswith(LAYERS):
        return name.replace("y_encoder", "label_encoder")
    layer, module, kind = name.removeprefix(LAYERS).partition(".")[0], *name.split(".", 3)[3].rsplit(".", 1)
    return f"layers.{layer}.{RENAMED[module]}.{kind}"
