"""An undoable change to a live model, and `undo`, which gives a model back whatever was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

from torch import nn

from keyquery.checkpoints.sources import bare
from keyquery.listening.exclusive import Changes, alone, close, left_open

H = TypeVar("H", bound="Handle")
# Names of the attention dropout of architectures: a number, or an nn.Dropout.
DROPOUTS = ("attn_dropout", "attention_dropout", "dropout")


class Handle:
    """Undoes a change by `.undo()`, or as a context manager at its end, also after an exception."""

    def __init__(self, changes: Changes, what: str) -> None:
        self._changes = changes
        self.what = f"{what} of {type(changes.model).__name__}"

    def __enter__(self) -> Self:
        self.require()
        return self

    def __exit__(self, *error: object) -> None:
        if not self.undone:
            self.undo()

    def undo(self) -> None:
        """Restore the model bit for bit."""
        self.require()
        close(self._changes)

    @property
    def undone(self) -> bool:
        """Whether the change was undone, also by `kq.undo`."""
        return not self._changes.is_open

    def require(self) -> None:
        """Raise if the change is already undone."""
        if self.undone:
            raise RuntimeError(f"the {self.what} is already undone")

    def __repr__(self) -> str:
        state = "undone" if self.undone else "active: .undo() or kq.undo(model) gives the model back"
        return f"<{self.what}, {state}>"


def lasting(model: nn.Module, change: Callable[[Changes], H]) -> H:
    """Make a change that lasts until its handle undoes it; if it fails, nothing is changed."""
    changes = Changes(model)
    try:
        with alone(model):
            return change(changes)
    except BaseException:
        changes.close()
        raise


def undo(model: nn.Module) -> None:
    """Give a model back bit for bit, whatever was changed in it.

    Undoes every dial, projection, swap and ablation of the model, of its submodules and of models that contain it,
    newest first, and detaches listeners: for handles that were not kept, and after an interrupt in the middle of a
    change. A model that is not changed stays as it is. An analysis of it in another thread ends with an error.

    Parameters
    ----------
    model
        A live model.

    Examples
    --------
    >>> model, x = kq.Encoder(8, depth=1, heads=2).eval(), torch.randn(1, 5, 8)
    >>> before = model(x)
    >>> kq.dial(model, skew=0)
    <dial of Encoder, active: .undo() or kq.undo(model) gives the model back>
    >>> kq.undo(model)
    >>> torch.equal(model(x), before)
    True

    See Also
    --------
    dial, project, swap, ablate_heads : Changes, each of which can also be undone alone.
    """
    close(*left_open(bare(model)))


def rate_of(module: nn.Module, names: tuple[str, ...] = DROPOUTS) -> float:
    """The dropout rate of a module, or of its attribute of one of these names; 0 if there is none."""
    kept: Any = module
    if not isinstance(module, nn.Dropout):
        kept = next((getattr(module, name) for name in names if hasattr(module, name)), 0.0)
    rate = getattr(kept, "p", kept)
    return float(rate) if isinstance(rate, (int, float)) else 0.0


def check_model(model: nn.Module) -> nn.Module:
    """The bare model; raises for meta weights, active dropout, or anything that is not a module."""
    model = bare(model)
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError("the model is on the meta device: load its weights first")
    dropping = [name for name, module in model.named_modules() if module.training and rate_of(module) > 0]
    if dropping:
        raise ValueError(f"{dropping[0] or 'the model'} is in training mode with dropout: call model.eval() first")
    return model
