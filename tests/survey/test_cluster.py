"""A survey on a real Dask scheduler with two worker processes, and what may happen to them."""

import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from keyquery import survey
from keyquery.survey import executors
from tests.survey.checkpoints import ENVIRONMENT, llama, results

pytest.importorskip("distributed")

# In each worker: one that finds the file `die` beside its model removes it and is killed, in the middle of a job.
PRELOAD = """
import os, signal
from pathlib import Path
import keyquery.survey.worker as work

def measured(source, real=work.look_at, **options):
    order = Path(source).parent / "die"
    try:
        order.unlink()
    except FileNotFoundError:
        return real(source, **options)
    os.kill(os.getpid(), signal.SIGKILL)

work.look_at = measured
"""


class Machines:
    """Processes of a cluster on this machine."""

    def __init__(self, folder):
        self.preload = folder / "preload.py"
        self.preload.write_text(PRELOAD)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address, self.running = f"tcp://127.0.0.1:{self.port}", []

    def start(self, what, *arguments):
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", "--host", "127.0.0.1", "--no-dashboard"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.running.append(subprocess.Popen([*command, *arguments], env=ENVIRONMENT, **quiet))
        return self.running[-1]

    def scheduler(self):
        return self.start("scheduler", "--port", str(self.port))

    def workers(self, count=2):
        options = ("--nthreads", "1", "--no-nanny", "--preload", str(self.preload))
        return [self.start("worker", self.address, *options) for _ in range(count)]

    def stop(self):
        for process in self.running:
            process.kill()
            process.wait()


@pytest.fixture
def machines(tmp_path):
    found = Machines(tmp_path)
    yield found
    found.stop()


def survey_on(machines, models, out, **options):
    """A survey by the scheduler, which starts in its own time."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with socket.socket() as knocking:
            if knocking.connect_ex(("127.0.0.1", machines.port)) == 0:
                break
        time.sleep(0.1)
    return survey.run(models, out, scheduler=machines.address, **options)


def test_a_scheduler_gives_what_this_machine_gives(tmp_path):
    distributed = pytest.importorskip("distributed")
    models = [llama(tmp_path / "models" / f"m{i}", seed=i) for i in range(2)]
    alone = survey.run(models, tmp_path / "alone", workers=1)
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster:
        together = survey.run(models, tmp_path / "together", scheduler=cluster.scheduler_address)
    assert together == alone
    assert results(tmp_path / "together") == results(tmp_path / "alone")


@pytest.mark.slow
def test_a_worker_is_killed_in_the_middle(tmp_path, machines):
    models = [llama(tmp_path / "models" / f"m{i}", layers=3, seed=i) for i in range(2)]
    alone = survey.run(models, tmp_path / "alone", workers=1)
    order = tmp_path / "models" / "die"
    order.touch()
    machines.scheduler()
    workers = machines.workers()
    together = survey_on(machines, models, tmp_path / "together")
    assert together == alone
    assert results(tmp_path / "together") == results(tmp_path / "alone")
    assert not order.exists()
    assert sorted(worker.poll() for worker in workers if worker.poll() is not None) == [-signal.SIGKILL]


@pytest.mark.slow
def test_a_scheduler_that_is_lost_ends_the_survey_and_the_same_command_resumes(tmp_path, machines):
    models = [llama(tmp_path / "models" / f"m{i}", seed=i) for i in range(30)]
    scheduler = machines.scheduler()
    machines.workers(1)

    def watch(items, what, total):
        for item in items:
            yield item
            scheduler.kill()
            scheduler.wait()

    with pytest.raises(ConnectionError, match="was lost; recorded results are kept, and the same command resumes"):
        survey_on(machines, models, tmp_path / "out", progress=watch)
    assert list((tmp_path / "out" / "records").glob("*.json"))
    survey.run(models, tmp_path / "out", workers=1)
    survey.run(models, tmp_path / "alone", workers=1)
    assert results(tmp_path / "out") == results(tmp_path / "alone")


def test_an_address_where_nothing_answers_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "ANSWER", 1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (9, silent.getsockname()[1]):
            with pytest.raises(ConnectionError, match="no answer from a Dask scheduler at 'tcp://127"):
                list(executors.on_cluster([], f"tcp://127.0.0.1:{port}"))
    for address in ("", "head", "tcp://head:port", "http://127.0.0.1:8786", "tls://127.0.0.1:9", "tcp://[::1"):
        said = f"no answer from a Dask scheduler at {address!r}: expected an address such as tcp://host:8786 ("
        with pytest.raises(ValueError, match=re.escape(said)):
            list(executors.on_cluster([], address))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")
def test_with_tls_only_who_has_a_certificate_is_let_in(tmp_path, machines, monkeypatch):
    dask = pytest.importorskip("dask")
    key, pem = tmp_path / "key.pem", tmp_path / "pem.pem"
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", pem, "-days", "2"]
    subprocess.run([*made, *name], check=True, capture_output=True)
    own = ("--tls-ca-file", pem, "--tls-cert", pem, "--tls-key", key)
    models, plain = [llama(tmp_path / "models" / "m")], machines.address
    machines.address = plain.replace("tcp", "tls")
    machines.start("scheduler", "--port", str(machines.port), "--protocol", "tls", *own)
    machines.start("worker", machines.address, "--nthreads", "1", "--no-nanny", *own)
    shown = {"ca-file": pem, "client.cert": pem, "client.key": key}
    with dask.config.set({f"distributed.comm.tls.{name}": str(path) for name, path in shown.items()}):
        together = survey_on(machines, models, tmp_path / "together")
    assert together == survey.run(models, tmp_path / "alone", workers=1)
    monkeypatch.setattr(executors, "ANSWER", 2)
    with pytest.raises(ValueError, match="TLS configuration"):
        list(executors.on_cluster([], machines.address))
    with pytest.raises(ConnectionError, match="no answer from a Dask scheduler"):
        list(executors.on_cluster([], plain))
