"""A worker process that answers jobs, one JSON line each; it is replaced when it crashes, hangs or has grown."""

from __future__ import annotations

import gc
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]  # where `tools` is found
TIMEOUT = 90.0  # seconds per job
MEMORY = 48 << 30  # bytes of a worker, with those of files that are mapped
GROWN = 2 << 20  # kilobytes of a worker that is replaced: what it imports and caches stays in memory
MARK = "answer: "  # models print lines of their own

Job = Mapping[str, Any]


def answered(module: str, jobs: Iterable[Job]) -> Iterator[tuple[Job, dict[str, Any] | str]]:
    """Each job with the answer of `python -m module`, or with the reason why there is none."""
    worker = None
    for job in jobs:
        if worker is not None and _kilobytes(worker) > GROWN:
            _end(worker)
            worker = None
        worker = worker or _start(module)
        started = time.monotonic()
        answer = None
        with suppress(OSError):
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(job).encode() + b"\n")
            worker.stdin.flush()
            answer = _answer(worker)
        if answer is None:
            _end(worker)
            worker = None
            late = time.monotonic() - started >= TIMEOUT
            yield job, f"not done after {TIMEOUT:.0f} seconds" if late else "its process died"
        else:
            yield job, answer
    if worker is not None:
        _end(worker)


def serve(answer: Callable[[Job], Mapping[str, Any]]) -> None:
    """Answer the jobs on standard input until it ends; run in the worker."""
    import resource

    import torch

    from keyquery.support.extras import optional

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    logging = optional("transformers", "prove").logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for line in sys.stdin:
        print(MARK + json.dumps(answer(json.loads(line))), flush=True)
        gc.collect()  # tensors and the products they come from refer to each other


def _start(module: str) -> subprocess.Popen[bytes]:
    alone = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", module], env={**os.environ, **alone}, cwd=ROOT, **pipes)


def _kilobytes(worker: subprocess.Popen[bytes]) -> int:
    """How much memory of its own a process has."""
    with suppress(OSError):
        facts = dict(line.split(":", 1) for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines())
        return int(facts.get("VmData", "0").split()[0])
    return 0


def _end(worker: subprocess.Popen[bytes]) -> None:
    """Stop a worker, which is waiting for work or hangs."""
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _answer(worker: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """The next answer of a worker; None if it ends or takes too long."""
    assert worker.stdout is not None
    end = time.monotonic() + TIMEOUT
    while (left := end - time.monotonic()) > 0:
        if not select.select([worker.stdout], [], [], left)[0]:
            return None
        line = worker.stdout.readline()
        if not line:
            return None
        if line.startswith(MARK.encode()):
            facts: dict[str, Any] = json.loads(line[len(MARK) :])
            return facts
    return None
