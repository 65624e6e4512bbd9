"""`keyquery`, and `python -m keyquery`: an interrupt while the rest is imported is told in words too."""

from __future__ import annotations

import os
import signal
import sys


def set_environment() -> None:
    """Settings of NumPy that are read when it is imported."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its idle threads wait busily, beside those of torch


def main() -> None:
    """Import the command line and run it."""
    set_environment()
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # not where interrupts are ignored, as under nohup
        signal.signal(signal.SIGINT, _leave)  # some of what is imported swallows exceptions, interrupts among them
    from keyquery.cli import main as run

    signal.signal(signal.SIGINT, usual)
    try:
        run()
    except KeyboardInterrupt:
        _leave()


def _leave(*_: object) -> None:
    print("keyquery: interrupted", file=sys.stderr, flush=True)
    # There is nothing to unwind any more. After an interrupt inside of `exec`, as in the making of a dataclass, Python
    # would die of the signal where it should exit.
    os._exit(130)


if __name__ == "__main__":
    main()
