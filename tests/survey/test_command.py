"""`keyquery survey` as a user runs it, also where it is ended."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from keyquery import cli
from tests.processes import refusal
from tests.survey.checkpoints import ENVIRONMENT, llama

pytest.importorskip("pyarrow")


def test_a_broken_checkpoint_is_named_and_the_rest_is_written(tmp_path):
    llama(tmp_path / "zoo" / "run" / "step1")
    llama(tmp_path / "zoo" / "run" / "step20", alike=0.9)
    bad = tmp_path / "zoo" / "bad[red]"
    bad.mkdir()
    (bad / "model.safetensors").write_bytes(b"no")
    arguments = ["survey", str(tmp_path / "zoo"), "--out", str(tmp_path / "out"), "--workers", "1"]
    shown = CliRunner().invoke(cli.app, arguments)
    assert shown.exit_code == 1
    assert shown.output.index("run/step1 ") < shown.output.index("run/step20")
    assert "During training, run: symmetry goes from" in shown.output
    assert "Could not read bad[red]:" in shown.output
    assert (tmp_path / "out" / "index.html").is_file()
    quiet = CliRunner().invoke(cli.app, [*arguments, "-q"])
    assert (quiet.exit_code, quiet.stdout) == (1, "")
    assert quiet.stderr.startswith("keyquery: could not read bad[red]: ")


def test_two_places_to_work_at_are_one_too_many(tmp_path):
    words = ["survey", "x", "--out", tmp_path, "--workers", "1", "--scheduler", "tcp://x:1"]
    assert "not both" in refusal(*words)


def workers(process):
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [child for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are watched through /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_survey_that_is_terminated_takes_its_processes_with_it(number, tmp_path):
    for i in range(2):
        llama(tmp_path / "zoo" / f"m{i}", seed=i)
    command = [sys.executable, "-m", "keyquery", "survey", str(tmp_path / "zoo"), "--workers", "2", "--out"]
    process = subprocess.Popen([*command, tmp_path / "out"], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    while len(started := workers(process.pid)) < 2:  # which then import for seconds
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)  # a process whose start is interrupted would print a traceback
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err == "keyquery: terminated; recorded results are kept, and the same command resumes\n"
    assert [child for child in started if alive(child)] == []
    assert not list((tmp_path / "out").rglob(".*"))
