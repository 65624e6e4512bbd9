"""One call in a process of its own, with bounds on time and memory: a hang or a crash ends only that process."""

import builtins
import os
import resource
import signal
import time
import warnings
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path

from tests.fuzz.guard import resident


@dataclass
class Outcome:
    """What became of a call: its error, None where there was none; and by how many MiB the process grew."""

    error: tuple[str, str] | None
    grown: float


def bounded(call, seconds=10, memory=1024):
    """The outcome of `call` within so many seconds of work and MiB; AssertionError where it did not keep to them."""
    here, there = Pipe()
    before = resident()  # of the parent: the child begins without the pages of libraries
    with warnings.catch_warnings(action="ignore"):  # of threads, which the child does not use
        child = os.fork()
    if child == 0:
        error = None
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # what the parent used does not count
        try:
            call()
        except BaseException as raised:  # MemoryError and RecursionError, too
            error = type(raised).__name__, str(raised)[:2000]
        there.send((error, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20))
        os._exit(0)
    there.close()
    until = time.monotonic() + 6 * seconds  # for what waits without working: the machine may be busy
    while not here.poll(0.02):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"still waiting after {6 * seconds} s")
        if os.waitpid(child, os.WNOHANG)[0] and not here.poll():
            raise AssertionError(f"it crashed, or worked for more than {seconds} s")
    error, grown = here.recv()
    os.waitpid(child, 0)
    return Outcome(error, grown)


def assert_refused(call, words, seconds=10, memory=1024, growth=300):
    """Require a ValueError or an OSError whose text holds `words`, soon and without a flood."""
    found = bounded(call, seconds, memory)
    assert found.error is not None, "it was read"
    name, said = found.error
    assert name == "ValueError" or issubclass(getattr(builtins, name, int), OSError), found
    assert words in said, said
    assert "\x1b" not in said
    assert found.grown < growth, found


def assert_read(call, seconds=10, memory=1024, growth=300):
    """Require that it is read, soon and without a flood."""
    found = bounded(call, seconds, memory)
    assert found.error is None, found
    assert found.grown < growth, found
