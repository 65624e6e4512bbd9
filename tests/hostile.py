"""One call in a process of its own, with bounds on time and memory: a hang or a crash ends only that process."""

import builtins
import json
import resource
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.guard import resident
from tests.processes import forked


@dataclass
class Outcome:
    """What became of a call: its error, None where there was none; and by how many MiB the process grew."""

    error: tuple[str, str] | None
    grown: float


def bounded(call, seconds=10, memory=1024):
    """The outcome of `call` within so many seconds of work and MiB; AssertionError where it did not keep to them."""
    before = resident()  # of the parent: the child begins without the pages of libraries

    def limited():
        error = None
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # what the parent used does not count
        try:
            call()
        except BaseException as raised:  # MemoryError and RecursionError, too
            error = type(raised).__name__, str(raised)[:2000]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        print(json.dumps([error, grown / 2**20]))

    done = forked(limited, seconds=6 * seconds)  # for what waits without working: the machine may be busy
    assert done.returncode == 0, f"it crashed, or took more than {seconds} s: {done}"
    return Outcome(*json.loads(done.stdout.splitlines()[-1]))


def assert_refused(call, words, seconds=10, memory=1024, growth=300):
    """Require a ValueError or an OSError whose text holds `words`, soon and without a flood."""
    outcome = bounded(call, seconds, memory)
    assert outcome.error is not None, "it was read"
    name, said = outcome.error
    assert name == "ValueError" or issubclass(getattr(builtins, name, int), OSError), outcome
    assert words in said, said
    assert "\x1b" not in said
    assert outcome.grown < growth, outcome


def assert_read(call, seconds=10, memory=1024, growth=300):
    """Require that it is read, soon and without a flood."""
    outcome = bounded(call, seconds, memory)
    assert outcome.error is None, outcome
    assert outcome.grown < growth, outcome
