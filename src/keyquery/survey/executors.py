"""Who does the work: this process, the cores of this machine, or a Dask cluster, each as a concurrent.futures.Executor.

Workers, and the scheduler, may be lost at any time. What was under way is then done again, and nothing else.
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
from typing import Any, Protocol, runtime_checkable

import torch

from keyquery.checkpoints.sources import first_line
from keyquery.support.extras import optional
from keyquery.survey.worker import Job, perform

PAUSE = 5.0  # seconds without a result after which a crew is asked whether it is still there
ANSWER = 10  # seconds in which a scheduler must
PATIENCE = 120.0  # seconds for a scheduler to come back
DEATHS = 3  # of workers that had nothing else to do, from which on a job is at fault


@runtime_checkable
class Crew(Protocol):
    """Workers behind an Executor that is opened anew when it is lost."""

    ahead: int  # jobs that are handed out at a time
    alone: bool  # whether all jobs are lost with one worker, so that whose fault it was shows only alone
    lost: tuple[type[BaseException], ...]  # errors of a crew that is gone
    fatal: tuple[type[BaseException], ...]  # errors that say: this job has killed its workers

    def open(self, anew: bool = False) -> Executor:
        """The executor; another one, if the last was lost."""

    def alive(self) -> bool:
        """Whether those who were handed jobs still have them."""

    def close(self, now: bool = False) -> None:
        """Let go of the workers; what waits is not begun, and `now` what is under way is not finished."""


class Here(Executor):
    """This process: a job is done when it is handed over."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Do it now."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Cores:
    """Processes of this machine; one worker is this process itself."""

    def __init__(self, workers: int) -> None:
        self.workers, self.ahead, self.alone = workers, 2 * workers if workers > 1 else 1, True
        self.lost: tuple[type[BaseException], ...] = (BrokenExecutor,)
        self.fatal: tuple[type[BaseException], ...] = ()
        self._pool: Executor | None = None

    def open(self, anew: bool = False) -> Executor:
        """A pool of processes."""
        if self._pool is not None and not anew:
            return self._pool
        self.close()
        context = get_context("spawn")  # a forked process would inherit the locks of this one's threads
        self._pool = Here() if self.workers == 1 else ProcessPoolExecutor(self.workers, context, _begin)
        return self._pool

    def alive(self) -> bool:
        """A pool tells by itself that it is broken."""
        return True

    def close(self, now: bool = False) -> None:
        """Wait for what is under way, or `now` kill who does it; records are written whole or not at all."""
        if self._pool is not None:
            for process in list((getattr(self._pool, "_processes", None) or {}).values()) if now else ():
                process.kill()
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


class Cluster:
    """The workers of a Dask scheduler; who they are, and how many, is Dask's own business."""

    ahead, alone = 2000, False  # jobs are small; but a scheduler is not asked to hold a million of them

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        self._distributed = optional("distributed", "a scheduler")
        self.address, self.patience = address, patience
        closed = (
            optional("distributed.client", "a scheduler").ClosedClientError,
            optional("distributed.comm", "a scheduler").CommClosedError,
        )
        self.lost: tuple[type[BaseException], ...] = (CancelledError, *closed)
        self.fatal: tuple[type[BaseException], ...] = (self._distributed.KilledWorker,)
        self._client: Any = None
        self._scheduler: str | None = None
        self._workers = 0

    def open(self, anew: bool = False) -> Executor:
        """An executor of the scheduler; one that was there before is waited for."""
        if self._client is None or anew:
            self.close()
            self._connect(again=self._scheduler is not None)
        executor: Executor = self._client.get_executor(pure=False)
        return executor

    def _connect(self, again: bool) -> None:
        until = time.monotonic() + (self.patience if again else 0)
        while True:
            try:
                self._knock()
                self._client = self._distributed.Client(self.address, timeout=ANSWER, set_as_default=False)
                self._scheduler = self._identity()
                break
            except Exception as error:  # an address that is none makes Dask raise whatever it stumbles over
                self.close()
                if time.monotonic() < until:
                    time.sleep(0.5)
                    continue
                since = f" since {self.patience:.0f} seconds" if again else ""
                kept = "; what is recorded stays, and the same command goes on" if again else ""
                said = f"no Dask scheduler answers at {self.address!r}{since}{kept}"
                if isinstance(error, OSError):
                    raise ConnectionError(said) from None
                expected = "expected an address such as tcp://host:8786"
                raise ValueError(f"{said}: {expected} ({first_line(error)})") from None

    def _knock(self) -> None:
        """Raise unless something answers: a Client that could not connect waits and complains when it is deleted."""

        async def connect() -> None:
            how = self._distributed.Security().get_connection_args("client")
            opening = optional("distributed.comm", "a Dask cluster").connect(self.address, timeout=ANSWER, **how)
            await (await asyncio.wait_for(opening, ANSWER)).close()  # who listens may say nothing

        with ThreadPoolExecutor(1) as apart:  # this thread may have an event loop of its own, as in a notebook
            apart.submit(asyncio.run, connect()).result()

    def alive(self) -> bool:
        """Whether the scheduler is the same one: another knows nothing of our jobs."""
        try:
            found = self._identity()
            if not self._workers:
                logging.getLogger(__name__).warning("the scheduler at %s has no workers: waiting", self.address)
            return found == self._scheduler
        except Exception:  # closed, refused, too late: it is not there
            return False

    def close(self, now: bool = False) -> None:
        """Leave the cluster; it stays. What waits there is cancelled."""
        if self._client is not None:
            with suppress(Exception):  # a scheduler that is gone cannot be told
                self._client.close(timeout=2)
            self._client = None

    def _identity(self) -> str:
        client = self._client
        facts = client.sync(client.scheduler.identity, callback_timeout=ANSWER)
        self._workers = len(facts["workers"])
        return str(facts["id"])


def gather(crew: Crew, jobs: deque[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Each job with what came of it, as they are done; `jobs` may grow meanwhile."""
    flying: dict[Future[Any], Job] = {}
    finished: SimpleQueue[Future[Any]] = SimpleQueue()
    deaths: Counter[Job] = Counter()
    executor = crew.open()
    while jobs or flying:
        try:
            while jobs and _room(crew, jobs[0], flying.values(), deaths):
                future = executor.submit(perform, jobs[0])
                flying[future] = jobs.popleft()
                future.add_done_callback(finished.put)
            done = _next(crew, finished)
            outcome = {} if done is None else _outcome(crew, done)
        except crew.lost:
            held = list(flying.values())
            deaths.update(held)
            guilty = crew.alone and len(held) == 1 and deaths[held[0]] >= DEATHS
            flying, finished = {}, SimpleQueue()
            executor = crew.open(anew=True)
            if guilty:
                yield held[0], {"broken": f"{DEATHS} workers were killed over it: is there too little memory?"}
            else:
                jobs.extendleft(reversed(held))
        else:
            if done is not None:
                yield flying.pop(done), outcome


def _room(crew: Crew, job: Job, flying: Collection[Job], deaths: Counter[Job]) -> bool:
    """Whether a job may be handed out. What was under way when a process died goes alone: whose fault was it?"""
    if crew.alone and (deaths[job] or any(deaths[other] for other in flying)):
        return not flying
    return len(flying) < crew.ahead


def _next(crew: Crew, finished: SimpleQueue[Future[Any]]) -> Future[Any] | None:
    try:
        return finished.get(timeout=PAUSE)
    except Empty:
        if crew.alive():
            return None
        raise crew.lost[0] from None


def _outcome(crew: Crew, done: Future[Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = done.result()
    except crew.fatal as error:
        return {"broken": f"its workers were killed: {' '.join(str(error).split())}"}
    return found


def _begin() -> None:
    """What a process does first: one thread, no interrupts but the survey's own, and no life beyond it."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    above = parent_process()
    assert above is not None

    def follow() -> None:
        above.join()
        os._exit(1)

    Thread(target=follow, daemon=True).start()
