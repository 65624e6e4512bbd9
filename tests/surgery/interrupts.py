"""Interrupts at every line of the code that changes a model."""

import signal
import sys
from pathlib import Path

import torch

import keyquery as kq
from tests.surgery.tiny import assert_as_it_was, snapshot

SOURCE = Path(kq.__file__).parent
FILES = {str(SOURCE / name) for name in ("capture/guard.py", "surgery/handle.py", "surgery/rewriting/attach.py")}


class Interrupt:
    """Raises SIGINT at the nth line of some files that is run within it; of a loop, only its first round counts."""

    def __init__(self, at, files):
        self.at, self.files, self.seen, self.lines = at, files, 0, {}

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _trace(self, frame, event, arg):
        if frame.f_code.co_filename not in self.files or frame.f_code.co_name.startswith("<"):
            return None
        callers = (frame, frame.f_back, frame.f_back and frame.f_back.f_back)
        if any(caller and caller.f_code.co_name == "__del__" for caller in callers):  # where Python swallows them
            return None
        place = frame, event, frame.f_lineno
        if event in ("call", "line") and self.seen < self.at and place not in self.lines:
            self.lines[place] = self.seen = self.seen + 1
            if self.seen == self.at:
                self.lines.clear()
                signal.raise_signal(signal.SIGINT)
        return self._trace


def states(model):
    """What a model is, and what it shares with others."""
    names = [vars(m.config).get("_attn_implementation_internal") for m in model.modules() if hasattr(m, "config")]
    tables = [sys.modules[type(m).__module__].__dict__.get("ALL_ATTENTION_FUNCTIONS") for m in model.modules()]
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return names, tables, handlers, torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled()


def interrupted_everywhere(model, use, files=FILES, step=1):
    """Use a model again and again, with an interrupt some lines later each time; it must be as it was."""
    if (handle := use()) is not None:
        handle.undo()
    before, shared = snapshot(model), states(model)
    at = 1
    while True:
        came, handle = False, None
        with Interrupt(at, files) as interrupt:
            try:
                handle = use()
                if handle is not None:
                    handle.undo()
            except KeyboardInterrupt:
                came = True
        if handle is not None and not handle.undone:  # interrupted before it began to undo
            handle.undo()
        assert_as_it_was(model, before)
        assert states(model) == shared
        if interrupt.seen < at:
            return at // step
        assert came, f"the interrupt at line {at} was lost"
        at += step
