"""A survey on a real Dask scheduler with two worker processes, and what may happen to them."""

import re
import shutil
import socket
import subprocess

import pytest

from keyquery import survey
from keyquery.survey import executors
from tests.survey.checkpoints import llama, results

distributed = pytest.importorskip("distributed")
dask = pytest.importorskip("dask")
PLAIN = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
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


@pytest.fixture
def models(tmp_path):
    return [llama(tmp_path / "models" / f"m{i}", seed=i) for i in range(2)]


def assert_same(models, together, folder):
    """The same as of this machine alone, to the byte."""
    assert together == survey.run(models, folder / "alone", workers=1)
    assert results(folder / "together") == results(folder / "alone")


def test_a_scheduler_gives_what_this_machine_gives(models, tmp_path):
    with distributed.LocalCluster(processes=False, **PLAIN) as cluster:
        together = survey.run(models, tmp_path / "together", scheduler=cluster.scheduler_address)
    assert_same(models, together, tmp_path)


@pytest.mark.slow
def test_a_worker_is_killed_in_the_middle(models, tmp_path):
    order, preload = tmp_path / "models" / "die", tmp_path / "preload.py"
    order.touch()
    preload.write_text(PRELOAD)
    with distributed.LocalCluster(processes=True, preload=str(preload), **PLAIN) as cluster:
        together = survey.run(models, tmp_path / "together", scheduler=cluster.scheduler_address)
    assert not order.exists()
    assert_same(models, together, tmp_path)


@pytest.mark.slow
def test_a_scheduler_that_is_lost_ends_the_survey_and_the_same_command_resumes(tmp_path):
    models = [llama(tmp_path / "models" / f"m{i}", seed=i) for i in range(30)]
    cluster = distributed.LocalCluster(processes=True, **{**PLAIN, "n_workers": 1})

    def watch(items, what, total):
        for item in items:
            yield item
            cluster.close()

    with pytest.raises(ConnectionError, match="was lost; recorded results are kept, and the same command resumes"):
        survey.run(models, tmp_path / "together", scheduler=cluster.scheduler_address, progress=watch)
    assert list((tmp_path / "together" / "records").glob("*.json"))
    assert_same(models, survey.run(models, tmp_path / "together", workers=1), tmp_path)


def test_an_address_where_nothing_answers_is_one_sentence(monkeypatch):
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
def test_with_tls_only_who_has_a_certificate_is_let_in(models, tmp_path, monkeypatch):
    key, pem = tmp_path / "key.pem", tmp_path / "pem.pem"
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", pem, "-days", "2"]
    subprocess.run([*made, *name], check=True, capture_output=True)
    files = {"key": str(key), "cert": str(pem)}
    own = {f"tls_{who}_{what}": path for who in ("client", "scheduler", "worker") for what, path in files.items()}
    security = distributed.Security(tls_ca_file=str(pem), **own)
    asked = {"ca-file": str(pem), **{f"client.{what}": path for what, path in files.items()}}
    with distributed.LocalCluster(processes=True, protocol="tls://", security=security, **PLAIN) as cluster:
        address = cluster.scheduler_address
        with dask.config.set({f"distributed.comm.tls.{name}": path for name, path in asked.items()}):
            together = survey.run(models, tmp_path / "together", scheduler=address)
        with pytest.raises(ValueError, match="TLS configuration"):
            list(executors.on_cluster([], address))
        with pytest.raises(ConnectionError, match="no answer from a Dask scheduler"):
            list(executors.on_cluster([], address.replace("tls", "tcp")))
    assert_same(models, together, tmp_path)
