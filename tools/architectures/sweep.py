"""Proofs of many config types: a worker process that is restarted when it crashes or hangs; results as JSON lines."""

from __future__ import annotations

import gc
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha1
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from keyquery.proof.models import model_types
from keyquery.proof.proof import STATUSES, Proof, prove
from keyquery.support.extras import optional
from keyquery.support.files import append_line, regular

ROOT = Path(__file__).parents[2]  # where `tools` is found
TIMEOUT = 90.0  # seconds per type
MEMORY = 6 << 30  # bytes of a worker
TYPES = 50  # after so many, a worker is replaced: what it imports stays in memory


def sweep(
    types: Iterable[str] | None = None,
    cache: Path | None = None,
    progress: Callable[[Proof], None] | None = None,
) -> list[Proof]:
    """Proofs of config types (default: all that transformers has), one at a time in a worker process.

    `cache` is a file of JSON lines: what it holds for this version of transformers and these readers is not proven
    again.
    """
    if cache is not None and cache.exists():
        regular(cache)
    wanted = list(model_types() if types is None else types)
    known = {} if cache is None else cached(cache)
    proofs = {name: known[name] for name in wanted if name in known}
    for proof in _proofs([name for name in wanted if name not in proofs]):
        proofs[proof.model_type] = proof
        if cache is not None:
            # After a line end: a killed process may have left a part of a line.
            append_line(cache, "\n" + json.dumps({**asdict(proof), "reader": reader_digest()}))
        if progress is not None:
            progress(proof)
    return [proofs[name] for name in wanted if name in proofs]


def cached(file: Path) -> dict[str, Proof]:
    """Proofs in a file of JSON lines that still hold: of the installed transformers and of this reader."""
    installed, digest, proofs = version("transformers"), reader_digest(), {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # a killed process may have written a part
            facts = json.loads(line)
            if facts.pop("reader", None) == digest and facts["transformers"] == installed:
                proofs[facts["model_type"]] = Proof(**facts)
    return proofs


def reader_digest() -> str:
    """A digest of the files that say how checkpoints are read."""
    folder, digest = files("keyquery.checkpoints"), sha1()
    for part in (folder, *(folder.joinpath(name) for name in ("configs", "families", "positions"))):
        for file in sorted(part.iterdir(), key=lambda file: file.name):
            if file.name.endswith((".py", ".toml")):
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def counts(proofs: Iterable[Proof]) -> dict[str, int]:
    """How many proofs have each status."""
    statuses = [proof.status for proof in proofs]
    return {status: statuses.count(status) for status in STATUSES}


def _proofs(types: list[str]) -> Iterator[Proof]:
    worker = None
    for index, name in enumerate(types):
        if worker is not None and index % TYPES == 0:
            _end(worker)
            worker = None
        if worker is None:
            worker = _worker()
        assert worker.stdin is not None
        started = time.monotonic()
        try:
            worker.stdin.write(f"{name}\n".encode())
            worker.stdin.flush()
            answer = _answer(worker, TIMEOUT)
        except OSError:
            answer = None
        if answer is None:
            late = time.monotonic() - started >= TIMEOUT
            _end(worker)
            worker = None
            reason = f"not done after {TIMEOUT:.0f} seconds" if late else "its process died"
            yield Proof(name, "cannot be built", reason, transformers=version("transformers"))
        else:
            yield Proof(**answer)
    if worker is not None:
        _end(worker)


def _end(worker: subprocess.Popen[bytes]) -> None:
    """Stop a worker, which is waiting for work or hangs."""
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _worker() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tools.architectures.sweep"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=environment, cwd=ROOT, **pipes)


def _answer(worker: subprocess.Popen[bytes], timeout: float) -> dict[str, Any] | None:
    """The next JSON line of a worker; None if it ends or takes too long."""
    assert worker.stdout is not None
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select([worker.stdout], [], [], left)
        if not ready:
            return None
        line = worker.stdout.readline()
        if not line:
            return None
        if line.startswith(b'{"model_type"'):
            facts: dict[str, Any] = json.loads(line)
            return facts
    return None


def _serve() -> None:
    """Prove the types named on standard input, a JSON line each."""
    import resource

    import torch

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    logging = optional("transformers", "prove").logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for line in sys.stdin:
        name = line.strip()
        try:
            proof = prove(name)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            proof = Proof(name, "cannot be built", reason, transformers=version("transformers"))
        print(json.dumps(asdict(proof)), flush=True)
        gc.collect()  # tensors and the products they come from refer to each other


if __name__ == "__main__":
    _serve()
