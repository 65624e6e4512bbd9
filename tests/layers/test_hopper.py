"""Triton kernels compile for Hopper GPUs, also where there is none."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.hopper"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    names = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert {"_forward", "_backward", "_statistics", "_widen", "_reduce", "_bisect"} <= names
