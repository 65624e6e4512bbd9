"""Backends that run jobs: this process, local worker processes or a Dask cluster, each via concurrent.futures.Executor.

Workers and the scheduler may die at any time; only the jobs that were running are then repeated.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context, parent_process
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch

from keyquery.support.extras import optional
from keyquery.support.printable import first_line
from keyquery.survey.worker import Job, perform

PAUSE = 5.0  # seconds without a result after which the backend is checked
ANSWER = 10  # seconds within which a scheduler must answer
PATIENCE = 120.0  # seconds to wait for a lost scheduler to come back
DEATHS = 3  # worker deaths with only this job running, after which the job is given up
Errors = tuple[type[BaseException], ...]


class InlineExecutor(Executor):
    """Runs each job in this process, as soon as it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the job and return its finished future."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Cores:
    """Local worker processes; with one worker, this process itself."""

    alone = True  # one dead worker loses all jobs, so suspects must be retried one at a time
    lost: Errors = (BrokenExecutor,)  # these mean that the executor is gone
    fatal: Errors = ()  # these mean that a job has killed its workers

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.ahead = 2 * workers if workers > 1 else 1  # jobs that are submitted at a time
        self._pool: Executor | None = None

    def open(self, replace: bool = False) -> Executor:
        """The executor; with `replace`, a new one in place of one that was lost."""
        if self._pool is not None and not replace:
            return self._pool
        self.close()
        context = get_context("spawn")  # a forked process would inherit the locks of this one's threads
        self._pool = InlineExecutor() if self.workers == 1 else ProcessPoolExecutor(self.workers, context, _begin)
        return self._pool

    def alive(self) -> bool:
        """Always true: a pool raises by itself when it is broken."""
        return True

    def close(self, now: bool = False) -> None:
        """Wait for running jobs or, with `now`, kill them; records are written completely or not at all."""
        if self._pool is not None:
            for process in list((getattr(self._pool, "_processes", None) or {}).values()) if now else ():
                process.kill()
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


class Cluster:
    """The workers of a Dask scheduler, which Dask manages itself."""

    ahead, alone = 2000, False  # jobs are small, but a scheduler should not hold millions of them

    def __init__(self, address: str) -> None:
        self._distributed = optional("distributed", "a scheduler")
        self.address = address
        closed = (
            optional("distributed.client", "a scheduler").ClosedClientError,
            optional("distributed.comm", "a scheduler").CommClosedError,
        )
        self.lost: Errors = (CancelledError, *closed)
        self.fatal: Errors = (self._distributed.KilledWorker,)
        self._client: Any = None
        self._scheduler: str | None = None
        self._workers = 0

    def open(self, replace: bool = False) -> Executor:
        """An executor of the scheduler; a scheduler that was lost is waited for."""
        if self._client is None or replace:
            self.close()
            self._connect(again=self._scheduler is not None)
        executor: Executor = self._client.get_executor(pure=False)
        return executor

    def _connect(self, again: bool) -> None:
        until = time.monotonic() + (PATIENCE if again else 0)
        while True:
            try:
                self._check_address()
                self._client = self._distributed.Client(self.address, timeout=ANSWER, set_as_default=False)
                self._scheduler = self._identity()
                break
            except Exception as error:  # Dask raises errors of many types for an invalid address
                self.close()
                if time.monotonic() < until:
                    time.sleep(0.5)
                    continue
                since = f" for {PATIENCE:.0f} seconds" if again else ""
                kept = "; recorded results are kept, and the same command resumes" if again else ""
                problem = f"no answer from a Dask scheduler at {self.address!r}{since}{kept}"
                if isinstance(error, OSError):
                    raise ConnectionError(problem) from None
                expected = "expected an address such as tcp://host:8786"
                raise ValueError(f"{problem}: {expected} ({first_line(error)})") from None

    def _check_address(self) -> None:
        """Raise unless something answers; a Client that cannot connect would block, and warn when it is deleted."""

        async def connect() -> None:
            how = self._distributed.Security().get_connection_args("client")
            opening = optional("distributed.comm", "a Dask cluster").connect(self.address, timeout=ANSWER, **how)
            await (await asyncio.wait_for(opening, ANSWER)).close()  # whatever listens there may never answer

        with ThreadPoolExecutor(1) as thread:  # the current thread may already run an event loop, as in a notebook
            thread.submit(asyncio.run, connect()).result()

    def alive(self) -> bool:
        """Whether the scheduler is still the same one; a restarted scheduler has lost our jobs."""
        try:
            identity = self._identity()
            if not self._workers:
                logging.getLogger(__name__).warning("the scheduler at %s has no workers: waiting", self.address)
            return identity == self._scheduler
        except Exception:  # closed, refused or timed out
            return False

    def close(self, now: bool = False) -> None:
        """Disconnect from the cluster, which keeps running; pending jobs are cancelled."""
        if self._client is not None:
            with suppress(Exception):  # the scheduler may be gone
                self._client.close(timeout=2)
            self._client = None

    def _identity(self) -> str:
        client = self._client
        facts = client.sync(client.scheduler.identity, callback_timeout=ANSWER)
        self._workers = len(facts["workers"])
        return str(facts["id"])


Backend = Cores | Cluster


def gather(backend: Backend, jobs: deque[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Each job with its result, in the order in which they finish; `jobs` may grow meanwhile."""
    running: dict[Future[Any], Job] = {}
    finished: SimpleQueue[Future[Any]] = SimpleQueue()
    deaths: Counter[Job] = Counter()
    executor = backend.open()
    while jobs or running:
        try:
            while jobs and _may_submit(backend, jobs[0], running.values(), deaths):
                future = executor.submit(perform, jobs[0])
                running[future] = jobs.popleft()
                future.add_done_callback(finished.put)
            done = _next(backend, finished)
            outcome = {} if done is None else _outcome(backend, done)
        except backend.lost:
            interrupted = list(running.values())
            deaths.update(interrupted)
            give_up = backend.alone and len(interrupted) == 1 and deaths[interrupted[0]] >= DEATHS
            running, finished = {}, SimpleQueue()
            executor = backend.open(replace=True)
            if give_up:
                yield interrupted[0], {"broken": f"{DEATHS} workers died while processing it, maybe out of memory"}
            else:
                jobs.extendleft(reversed(interrupted))
        else:
            if done is not None:
                yield running.pop(done), outcome


def _may_submit(backend: Backend, job: Job, running: Collection[Job], deaths: Counter[Job]) -> bool:
    """Whether a job may be submitted; jobs that were running when a process died are retried one at a time."""
    if backend.alone and (deaths[job] or any(deaths[other] for other in running)):
        return not running
    return len(running) < backend.ahead


def _next(backend: Backend, finished: SimpleQueue[Future[Any]]) -> Future[Any] | None:
    try:
        return finished.get(timeout=PAUSE)
    except Empty:
        if backend.alive():
            return None
        raise backend.lost[0] from None


def _outcome(backend: Backend, done: Future[Any]) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = done.result()
    except backend.fatal as error:
        return {"broken": f"its workers were killed: {' '.join(str(error).split())}"}
    return outcome


def _begin() -> None:
    """Initialise a worker process: one thread, no interrupts of its own, and exit with the parent."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    Thread(target=follow, daemon=True).start()
