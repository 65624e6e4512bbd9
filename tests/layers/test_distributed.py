"""Every layer over several processes, data parallel and sharded: the same as alone on the joined batch."""

import os
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import keyquery as kq
from keyquery.layers import LanguageModel, Shape
from keyquery.layers.kernels import KERNELS
from keyquery.learn.layers import AttributeAttention, DatapointEncoder

WIDTH = 16


class Timed(nn.Module):
    """Events at times, by one tensor: the first feature is when."""

    def __init__(self, **options):
        super().__init__()
        self.attention = kq.TimeAttention(WIDTH, 4, options.pop("code"), **options)

    def forward(self, x):
        return self.attention(x, x[..., 0].double().cumsum(-1))


class Spoken(nn.Module):
    """A language model of tokens that are where the first feature is."""

    def __init__(self):
        super().__init__()
        shape = Shape(vocab_size=20, width=WIDTH, depth=2, num_attention_heads=4, length=8, causal=True)
        self.model = LanguageModel(shape)

    def forward(self, x):
        return self.model((x[..., 0].abs() * 5).long().clamp(max=19))


class Rows(nn.Module):
    """A layer of tables: each sequence as a table of so many rows, whose columns have 4 features each."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.unflatten(-1, (4, 4))).flatten(-2)


def encoder(kernel, rope=None, stack=kq.Encoder):
    return lambda: stack(WIDTH, depth=2, heads=4, kernel=kernel, rope=rope)


CASES = {
    **{f"encoder, {kernel}": encoder(kernel) for kernel in KERNELS},
    **{f"decoder, {kernel}, rotary": encoder(kernel, kq.Rope(4), kq.Decoder) for kernel in ("symmetric", "split")},
    "attention, grouped": lambda: kq.Attention(WIDTH, 4, kv_heads=2),
    "primal": lambda: kq.PrimalAttention(WIDTH, 2, rank=3),
    "time, Bochner": lambda: Timed(code=kq.BochnerTime(8)),
    "time, Mercer": lambda: Timed(code=kq.MercerTime(8, 2, 2)),
    "datapoints": lambda: Rows(kq.DatapointAttention(4, 4, 2)),
    "attributes": lambda: Rows(AttributeAttention(4, 2)),
    "table": lambda: Rows(DatapointEncoder(4, 4, 2, 2)),
    "language": Spoken,
}
# How a model is run: what is around it, and how exactly it must be as alone.
HOWS = {
    "ddp": 1e-5,
    "fsdp": 1e-5,
    "fsdp, checkpointed": 1e-5,
    "fsdp, bf16": 2e-2,
    "fsdp, compiled": 1e-5,
}
COMPILED = ("decoder, symmetric, rotary", "primal")  # others are alike


def start(name):
    torch.manual_seed(0)
    return CASES[name]()


def batch():
    return torch.randn(2, 4, 6, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()


def step(model, running, x, target, how):
    """The outputs, and the regularizer, before one step of SGD."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16) if "bf16" in how else nullcontext():
        out = checkpoint(running, x, use_reentrant=False) if "checkpointed" in how else running(x)
    penalty = kq.regularizer(model)
    goal = target[..., :1] if out.shape != target.shape else target
    ((out.float() - goal).square().mean() + penalty).backward()
    optimiser.step()
    return out.detach().float(), penalty.detach()


def sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in model.children():
        if isinstance(part, nn.ModuleList):
            for block in part:
                fully_shard(block, mesh=mesh)
        elif any(True for _ in part.parameters()):
            # The regularizer of a primal layer is of its last forward, and needs its weights until backward.
            fully_shard(part, mesh=mesh, reshard_after_forward=not isinstance(part, kq.PrimalAttention))
    return fully_shard(model, mesh=mesh)


def whole(weight):
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def names_of(how):
    if "compiled" in how:
        return COMPILED
    plain = how in ("ddp", "fsdp")
    return [name for name in CASES if plain or not name.startswith(("decoder", "encoder")) or "split" in name]


def work(folder):
    """What each process does: its half of the batch, all layers in all ways, one step each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # a process that lost its peer ends by itself
    rank, results = dist.get_rank(), {}
    for how in HOWS:
        for name in names_of(how):
            model = start(name)
            if "compiled" in how:  # in its place, before it is sharded
                model.compile(backend="eager")
            running = DistributedDataParallel(model) if how == "ddp" else sharded(model)
            local = sum(getattr(weight, "_local_tensor", weight).numel() for weight in model.parameters())
            try:
                out, penalty = step(model, running, *(part.chunk(2)[rank] for part in batch()), how)
            except Exception as error:
                raise RuntimeError(f"{name}, {how}") from error
            weights = {key: whole(weight.detach()) for key, weight in model.named_parameters()}
            results[how, name] = (out, penalty, weights, local)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One session of two processes for all."""
    folder = tmp_path_factory.mktemp("together")
    script = f"import sys; sys.path.insert(0, {os.getcwd()!r})\n"
    script += f"from tests.layers.test_distributed import work\nwork({str(folder)!r})\n"
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, folder / "script.py"], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


# One test, since tests that are shared out to several workers would have a session each.
@pytest.mark.slow
@pytest.mark.unchecked
def test_two_processes_are_one(results):
    for how in HOWS:
        check_as_alone(how, results)


def check_as_alone(how, results):
    """Two processes with half of the batch each are one process with all of it."""
    close = {"atol": HOWS[how], "rtol": 0}
    for name in names_of(how):
        alone, untrained, said = start(name), start(name), f"{name}, {how}"
        expected, penalty = step(alone, alone, *batch(), how)
        ranks = [result[how, name] for result in results]
        torch.testing.assert_close(torch.cat([out for out, *_ in ranks]), expected, **close, msg=said)
        mean = torch.stack([one for _, one, _, _ in ranks]).mean()
        torch.testing.assert_close(mean, penalty, atol=HOWS[how], rtol=HOWS[how], msg=said)
        total = sum(weight.numel() for weight in alone.parameters())
        for _, _, weights, local in ranks:
            assert local == total if how == "ddp" else local < 0.7 * total, said
            assert len(weights) == len(list(alone.parameters()))
            for key, weight in alone.named_parameters():
                torch.testing.assert_close(weights[key], weight.detach(), **close, msg=f"{said}: {key}")
        moved = max((a - b).abs().max() for a, b in zip(alone.parameters(), untrained.parameters(), strict=True))
        assert moved > 1e-3, said  # so that 1e-5 says something
