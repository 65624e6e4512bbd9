"""Triton kernels compile for Hopper GPUs, also where there is none."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper():
    done = subprocess.run([sys.executable, "-m", "tests.hopper"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert {"_forward", "_backward", "_finish", "_statistics", "_widen", "_narrow", "_soften", "_reduce"} <= names
