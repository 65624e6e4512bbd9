"""Where the jobs of a survey run: this process, local worker processes or a Dask cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Generator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any

import torch

from keyquery.support.extras import optional
from keyquery.support.printable import first_line
from keyquery.survey.worker import Facts, Job, perform

ANSWER = 10  # seconds within which a scheduler must answer
DIED = "a process died twice while measuring it, maybe out of memory"

Results = Generator[tuple[Job, Facts], None, None]


def on_cores(jobs: Sequence[Job], workers: int) -> Results:
    """Each job with its result, as they finish; with one worker in this process."""
    if workers == 1:
        yield from ((job, perform(job)) for job in jobs)
        return
    while jobs:
        left = yield from _in_pool(jobs, workers)
        running = min(len(left), 2 * workers)  # at most: a dead process ends those that were running, and the pool
        suspects, jobs = left[:running], left[running:]
        while suspects:
            left = yield from _in_pool(suspects, 1)
            if left:
                yield left[0], {"broken": DIED}
            suspects = left[1:]


def _in_pool(jobs: Sequence[Job], workers: int) -> Generator[tuple[Job, Facts], None, list[Job]]:
    """Results of new processes; returns the jobs that are left if one of these died."""
    left = dict.fromkeys(jobs)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin)  # a fork would inherit locks of other threads
    try:
        futures = {pool.submit(perform, job): job for job in jobs}
        for future in as_completed(futures):
            job = futures[future]
            facts = future.result()
            del left[job]
            yield job, facts
    except BrokenExecutor:
        pass
    finally:
        for process in list((pool._processes or {}).values()) if left else ():
            process.kill()
        pool.shutdown(cancel_futures=True)
    return list(left)


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


def on_cluster(jobs: Sequence[Job], address: str) -> Results:
    """Each job with its result, by the workers of a Dask scheduler, which repeats those of workers that die."""
    distributed = optional("distributed", "a scheduler")
    closed = optional("distributed.comm", "a scheduler").CommClosedError
    client = _connected(distributed, address)
    try:
        if not client.scheduler_info()["workers"]:
            logging.getLogger(__name__).warning("the scheduler at %s has no workers: waiting", address)
        futures = {client.submit(perform, job, pure=False): job for job in jobs}
        for future in distributed.as_completed(futures, loop=client.loop):
            try:
                yield futures[future], future.result()
            except distributed.KilledWorker as error:
                yield futures[future], {"broken": f"its workers were killed: {' '.join(str(error).split())}"}
    except (CancelledError, closed):
        raise ConnectionError(
            f"the Dask scheduler at {address!r} was lost; recorded results are kept, and the same command resumes"
        ) from None
    finally:
        with suppress(Exception):  # the scheduler may be gone
            client.close(timeout=2)


def _connected(distributed: Any, address: str) -> Any:
    try:
        _check_address(distributed, address)
        return distributed.Client(address, timeout=ANSWER, set_as_default=False)
    except Exception as error:  # Dask raises errors of many types for an invalid address
        problem = f"no answer from a Dask scheduler at {address!r}"
        if isinstance(error, OSError):
            raise ConnectionError(problem) from None
        raise ValueError(f"{problem}: expected an address such as tcp://host:8786 ({first_line(error)})") from None


def _check_address(distributed: Any, address: str) -> None:
    """Raise unless something answers; a Client that cannot connect would block, and warn when it is deleted."""

    async def connect() -> None:
        how = distributed.Security().get_connection_args("client")
        opening = optional("distributed.comm", "a Dask cluster").connect(address, timeout=ANSWER, **how)
        await (await asyncio.wait_for(opening, ANSWER)).close()  # whatever listens there may never answer

    with ThreadPoolExecutor(1) as thread:  # the current thread may already run an event loop, as in a notebook
        thread.submit(asyncio.run, connect()).result()
