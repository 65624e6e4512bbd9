"""The command line in this process or a fork of it, which has imported what a new process would import for seconds."""

import io
import os
import signal
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass

from typer.testing import CliRunner


@dataclass
class Outcome:
    """Exit code of a process, and what it wrote."""

    returncode: int
    stdout: bytes
    stderr: bytes


def forked(call, *, seconds=100, encoding="utf-8", **environment):
    """The outcome of `call` in a process of its own, with streams of this encoding and more environment variables.

    What differs from a new interpreter: all that the tests have imported is there. Tests of imports, of options of
    Python and of signals while it starts take a new one.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings(action="ignore"):  # of threads, which the child does not use
            child = os.fork()
        if child == 0:
            _run(call, out, err, seconds, encoding, environment)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return Outcome(code, out.read(), err.read())


def _run(call, out, err, seconds, encoding, environment):
    """What the child does; it never returns, or the tests would go on in two processes."""
    code = 1
    try:
        signal.alarm(seconds)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.environ.update(environment)
        sys.stdin = io.StringIO()
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding, write_through=True)
        sys.stderr = io.TextIOWrapper(
            io.FileIO(2, "w", closefd=False), encoding, "backslashreplace", write_through=True
        )
        warnings.resetwarnings()  # the tests turn them into errors
        call()
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else stopped.code is not None
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(*words):
    """The output of `keyquery WORDS` in this process, where it succeeds."""
    done = _invoked(words)
    assert done.exit_code == 0, done.output
    return done.output


def refusal(*words):
    """The error that `keyquery WORDS` ends with."""
    done = _invoked(words)
    assert done.exit_code != 0, done.output
    return str(done.exception)


def _invoked(words):
    from keyquery.cli import app

    return CliRunner().invoke(app, list(map(str, words)))


def keyquery(*arguments, **environment):
    """`keyquery ARGUMENTS` in a forked process; its terminal has 100 columns."""
    from keyquery.__main__ import main

    def command():
        sys.argv = ["keyquery", *map(str, arguments)]
        main()

    return forked(command, **{"COLUMNS": "100", **environment})
