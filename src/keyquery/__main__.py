"""`keyquery`, and `python -m keyquery`: an interrupt is one line, also while the command line is imported."""

from __future__ import annotations

import os


def set_environment() -> None:
    """Settings of NumPy that are read when it is imported."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its idle threads wait busily, beside those of torch


def main() -> None:
    """Import the command line and run it."""
    set_environment()
    try:
        from keyquery.cli import main as run

        run()
    except KeyboardInterrupt:
        from keyquery.cli.commands import leave

        leave()


if __name__ == "__main__":
    main()
