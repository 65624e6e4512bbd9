"""Encoders over several processes: data parallel and sharded, the same as alone on the joined batch."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import keyquery as kq
from keyquery.layers.kernels import KERNELS

CASES = [(kernel, rope) for kernel in KERNELS for rope in (None, kq.Rope(4))]


def start(kernel, rope):
    torch.manual_seed(0)
    return kq.Encoder(16, depth=2, heads=4, kernel=kernel, rope=rope)


def batch():
    return torch.randn(2, 4, 6, 16, generator=torch.Generator().manual_seed(1)).unbind()


def step(model, x, target):
    """The outputs before one step of SGD."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    out = model(x)
    (out - target).square().mean().backward()
    optimiser.step()
    return out.detach()


def sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(weight):
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def work(how, folder):
    """What each process does: its half of the batch, all kernels, one step each."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))  # a process that lost its peer ends by itself
    rank, results = dist.get_rank(), []
    for kernel, rope in CASES:
        model = start(kernel, rope)
        running = DistributedDataParallel(model) if how == "ddp" else sharded(model)
        out = step(running, *(part.chunk(2)[rank] for part in batch()))
        weights = {name: whole(weight.detach()) for name, weight in model.named_parameters()}
        local = sum(getattr(weight, "_local_tensor", weight).numel() for weight in model.parameters())
        results.append((out, weights, local))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_are_one_on_the_joined_batch(how, tmp_path):
    script = f"import sys; sys.path.insert(0, {os.getcwd()!r})\n"
    script += f"from tests.layers.test_distributed import work\nwork({how!r}, {str(tmp_path)!r})\n"
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, tmp_path / "script.py"], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    results = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)), strict=True)
    for (kernel, rope), ranks in zip(CASES, results, strict=True):
        alone, untrained = start(kernel, rope), start(kernel, rope)
        expected = step(alone, *batch())
        said = f"{kernel}, {rope}"
        torch.testing.assert_close(torch.cat([out for out, _, _ in ranks]), expected, atol=1e-5, rtol=0, msg=said)
        total = sum(weight.numel() for weight in alone.parameters())
        for _, weights, local in ranks:
            assert local == (total if how == "ddp" else total // 2), said
            assert len(weights) == len(list(alone.parameters()))
            for name, weight in alone.named_parameters():
                torch.testing.assert_close(weights[name], weight.detach(), atol=1e-5, rtol=0, msg=f"{said}: {name}")
        moved = max((a - b).abs().max() for a, b in zip(alone.parameters(), untrained.parameters(), strict=True))
        assert moved > 1e-3, said  # so that 1e-5 says something
