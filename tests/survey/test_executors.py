"""Signals that arrive while a job is submitted."""

import signal
from collections import deque
from concurrent.futures import Executor

import pytest

from keyquery.survey.executors import Cores, gather
from keyquery.survey.find_models import Entry
from keyquery.survey.worker import Job


class SignalledExecutor(Executor):
    """Receives SIGTERM in the middle of `submit`, as a pool does that is starting its processes."""

    submitted = False

    def submit(self, *_, **__):
        signal.raise_signal(signal.SIGTERM)
        self.submitted = True


def test_a_signal_waits_until_a_worker_has_been_started(monkeypatch):
    executor, backend = SignalledExecutor(), Cores(2)
    job = Job("open", Entry("/m", "m", "m"), "out", "token", ())
    monkeypatch.setattr(backend, "open", lambda: executor)

    def leave(number, _):
        raise SystemExit(128 + number)

    former = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit, match="143"):
            next(gather(backend, deque([job])))
        assert executor.submitted
        assert signal.getsignal(signal.SIGTERM) is leave
    finally:
        signal.signal(signal.SIGTERM, former)
