"""The monitor in two processes, under DDP and `fully_shard`, and in Lightning's trainer."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from keyquery.layers import LanguageModel
from keyquery.proof.families import tiny_model
from tests.instruments.monitor.models import language_model, monitored

SETUPS = [("ddp", "general"), ("fsdp", "general"), ("fsdp", "symmetric"), ("fsdp", "llama")]
METRICS = ("largest", "smallest", "entropy", "sink", "sigma", "bound", "effective_rank")


def make(kind):
    if kind != "llama":
        return language_model(kind)
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(tiny_model("llama").config)


def wrapped(model, how):
    if how == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for block in model.body.blocks if isinstance(model, LanguageModel) else model.model.layers:
        fully_shard(block)
    return fully_shard(model)


def train(model, ids, watched, tau=None):
    """Two steps on ids (steps, batch, n); weights, and the reading if watched."""
    optimiser = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    monitor = monitored(model, structure=1) if watched else None
    for batch in ids:
        out = model(batch)
        getattr(out, "logits", out).float().square().mean().backward()
        optimiser.step()
        if monitor is not None:
            monitor.step()
            if tau is not None:
                monitor.clip(tau)
        optimiser.zero_grad()
    whole = [getattr(weight, "full_tensor", lambda weight=weight: weight)() for weight in model.parameters()]
    weights = torch.cat([weight.detach().flatten() for weight in whole])
    return weights, None if monitor is None else monitor.reading()


def batches():
    return torch.randint(60, (2, 64, 16), generator=torch.Generator().manual_seed(0))


def work(folder):
    """What each of the two processes does."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}
    ids = batches().chunk(2, 1)[rank]
    for how, kind in SETUPS:
        plain, _ = train(wrapped(make(kind), how), ids, False)
        weights, reading = train(wrapped(make(kind), how), ids, True)
        clipped, clips = train(wrapped(make(kind), how), ids[:1], True, tau=0.04)
        curves = {name: np.array(reading.curves[name]) for name in METRICS}
        shares = np.array([reading.curves[name] for name in ("symmetric", "skew", "popularity", "position")])
        results[how, kind] = {"same": torch.equal(plain, weights), "clipped": clipped, "clips": len(clips.clips)}
        results[how, kind] |= {"curves": curves, "shares": shares, "gradients": reading.curves["query_gradient"]}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.unchecked
def test_two_processes_record_what_one_would(tmp_path):
    pytest.importorskip("transformers")
    script = f"import sys; sys.path.insert(0, {os.getcwd()!r})\n"
    script += f"from tests.instruments.monitor.test_together import work\nwork({str(tmp_path)!r})\n"
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run([*command, tmp_path / "script.py"], capture_output=True, text=True, timeout=240,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    for how, kind in SETUPS:
        ours, others = first[how, kind], second[how, kind]
        assert ours["same"], (how, kind)
        assert others["same"], (how, kind)
        _, alone = train(make(kind), batches(), True)
        for metric in METRICS:
            # Gradients are averaged in another order: the weights of the second step differ by rounding.
            ours_of, alone_of = ours["curves"][metric], np.array(alone.curves[metric])
            np.testing.assert_array_equal(ours_of, others["curves"][metric])
            np.testing.assert_allclose(ours_of[:, 0], alone_of[:, 0], rtol=2e-6, atol=1e-6, err_msg=f"{how} {metric}")
            np.testing.assert_allclose(ours_of, alone_of, rtol=2e-3, atol=1e-4, err_msg=f"{how} {kind} {metric}")
        np.testing.assert_array_equal(ours["shares"], others["shares"])
        assert np.isfinite(ours["shares"]).all()
        np.testing.assert_allclose(ours["gradients"], alone.curves["query_gradient"], rtol=2e-2, atol=1e-6)
        weights, clips = train(make(kind), batches()[:1], True, tau=0.04)
        assert 0 < ours["clips"] == len(clips.clips)
        torch.testing.assert_close(ours["clipped"], weights, rtol=1e-4, atol=1e-5)


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning(package, tmp_path):
    lightning = pytest.importorskip(package)
    rows = torch.randint(60, (24, 16), generator=torch.Generator().manual_seed(1))

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make("general")

        def training_step(self, batch, index):
            return torch.nn.functional.cross_entropy(self.net(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def fit(epochs, watched, checkpoint=None, tau=None):
        module = Module()
        monitor = monitored(module.net, every=2, folder=tmp_path) if watched else None
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", accumulate_grad_batches=2, default_root_dir=tmp_path,
            callbacks=[monitor.lightning(tau)] if watched else [], logger=False, enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4), ckpt_path=checkpoint)
        return torch.cat([weight.detach().flatten() for weight in module.parameters()]), trainer, monitor

    plain, _, _ = fit(2, False)
    _, trainer, monitor = fit(1, True)
    reading = monitor.reading()
    assert reading.steps == [0, 2]
    largest = np.array(reading.curves["largest"]).max(0)[-1]
    assert float(trainer.callback_metrics["attention/max largest"]) == pytest.approx(largest, rel=1e-6)
    assert len(reading.losses) == 2
    assert all(3.5 < loss < 4.7 for loss in reading.losses)  # about log 60: as the model returns it
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed, _, monitor = fit(2, True, tmp_path / "a.ckpt")
    reading = monitor.reading()
    assert reading.steps == [0, 2, 4]  # of 6: 12 batches, two a step
    assert all(curve[-1] > 0 for curve in reading.curves["query_gradient"])
    assert torch.equal(plain, resumed)
    _, _, monitor = fit(1, True, tau=0.05)
    assert monitor.reading().clips
