"""A study as its command runs it under torchrun, and one that is killed in the middle."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import keyquery as kq

RUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "keyquery"]
OPTIONS = ["--vocabulary", "300", "--width", "16", "--depth", "1", "--steps", "105", "--device", "cpu", "--quiet"]


@pytest.mark.slow
def test_a_study_under_torchrun_goes_on_after_a_kill_as_if_it_had_not_been(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra hf")
    corpus = tmp_path / "tale.txt"
    corpus.write_text(kq.models.TEXT.read_text() * 20)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KEYQUERY_TENSORBOARD": str(tmp_path / "board")}

    def command(name):
        out = ["--out", str(tmp_path / name), "--json", str(tmp_path / f"{name}.json")]
        return [*RUN, "study", "objectives", "--corpus", str(corpus), *OPTIONS, *out]

    whole = subprocess.run(command("whole"), capture_output=True, text=True, env=environment, timeout=600)
    assert whole.returncode == 0, whole.stderr[-3000:]
    with subprocess.Popen(command("killed"), env=environment, start_new_session=True, stderr=subprocess.DEVNULL) as run:
        begun = time.monotonic()
        while not list((tmp_path / "killed").rglob("*.checkpoint*")):
            assert run.poll() is None
            assert time.monotonic() - begun < 600
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGKILL)
    assert not (tmp_path / "killed.json").exists()
    again = subprocess.run(command("killed"), capture_output=True, text=True, env=environment, timeout=600)
    assert again.returncode == 0, again.stderr[-3000:]
    one, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "killed"))
    assert one == other
    assert any((tmp_path / "board").rglob("events*"))
