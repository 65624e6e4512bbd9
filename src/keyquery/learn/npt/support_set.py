"""Keys and values of the support set of an NPT, cached between predictions."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from keyquery.learn.inputs.tables import Rows
from keyquery.learn.layers.datapoints import Memory
from keyquery.learn.npt.network import TableNetwork


class Read(NamedTuple):
    """Cached keys and values of the support set, and the versions of the weights and rows they were computed from."""

    device: torch.device
    of: list[tuple[ReferenceType[Tensor], int]]
    memories: list[Memory]

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether the cache is valid for these tensors in their current state."""
        pairs = zip(self.of, tensors, strict=False)
        same = all(reference() is tensor and count == tensor._version for (reference, count), tensor in pairs)
        return same and len(self.of) == len(tensors)


READ: WeakKeyDictionary[Any, Read] = WeakKeyDictionary()  # kept outside, so that predict changes no estimator


def memories_of(estimator: Any, network: TableNetwork, context: Rows, device: torch.device) -> list[Memory]:
    """Keys and values of the rows of `context` in every layer; cached by estimator until weights or rows change."""
    cached, tensors = READ.get(estimator), [*network.parameters(), *context]
    if cached is None or cached.device != device or not cached.holds(tensors):
        memories = network.memories(context.to(device).within())
        cached = READ[estimator] = Read(device, [(ref(tensor), tensor._version) for tensor in tensors], memories)
    return cached.memories
