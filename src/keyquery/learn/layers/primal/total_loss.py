"""The regularizer of a whole model."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keyquery.learn.layers.primal.layer import PrimalAttention


def regularizer(model: nn.Module) -> Float[Tensor, ""]:
    """Sum of `regularizer()` over all primal layers of a model, to be added to the loss.

    Parameters
    ----------
    model
        Any module, after a forward pass.

    Returns
    -------
    Tensor
        A scalar; 0 if the model has no `PrimalAttention`.

    Raises
    ------
    RuntimeError
        If a primal layer has not been called.

    Examples
    --------
    >>> model = torch.nn.Sequential(kq.PrimalAttention(16, 2, rank=3), kq.PrimalAttention(16, 2, rank=3))
    >>> loss = model(torch.randn(1, 20, 16)).square().mean() + kq.regularizer(model)
    >>> loss.backward()
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PrimalAttention)}
    for name, layer in layers.items():
        if not layer._last.called:
            raise RuntimeError(f"{name or 'the layer'} was not called: its regularizer needs a forward pass")
    losses = [layer.regularizer() for layer in layers.values()]
    return torch.stack([loss.to(losses[0].device) for loss in losses]).sum() if losses else torch.zeros(())
