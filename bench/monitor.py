"""What a monitor costs: a training step with it over one without, and its maxima against float64.

On a GPU: a RoPE language model of 125 million parameters, sequences of 4,096 tokens, bfloat16 autocast; on the CPU a
small one in float32. Steps with and without a record alternate in one run.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from harness import publish, row, seconds

import keyquery as kq
from keyquery.instruments.monitor.statistics import LARGEST, call_statistics
from keyquery.layers import LanguageModel, Shape
from keyquery.listening.call import Call, Tokens

LARGE = {"vocab_size": 50304, "width": 768, "depth": 12, "num_attention_heads": 12}
SMALL = {"vocab_size": 1024, "width": 128, "depth": 4, "num_attention_heads": 4}
CYCLE = 4  # steps between records while they are timed
WARM = 20  # steps before any is timed
RANK, HEADS = 64, 12


def trainer(device: str, batch: int, length: int):
    """A model, and a function that makes one training step."""
    torch.manual_seed(0)
    model = LanguageModel(Shape(causal=True, rope=True, length=length, **(LARGE if device == "cuda" else SMALL)))
    model = model.to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    ids = torch.randint(model.config.vocab_size, (batch, length + 1), device=device)

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(ids[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return model, step


def overheads(device: str, batch: int, length: int, rounds: int, cycles: int):
    """Share of a step that the monitor adds, in %, by `every`; seconds of a step, of a record and of its structure.

    Host jitter moves whole blocks of steps by more than a record costs, so steps are timed one by one, in cycles of
    four: a record, the step at which its figures reach the host, and two that the monitor leaves alone. A record costs
    what the medians of the first three exceed that of the last by. A tenth of what ranks and shares cost is added.
    """
    model, step = trainer(device, batch, length)
    plain, whole = (kq.Monitor(model, every=CYCLE, structure=n, strict=True, on_alarm=ignore) for n in (10**9, 1))
    for _ in range(WARM):
        step()
    for monitor in (plain, whole):
        with monitor:
            for _ in range(2 * CYCLE):
                step()  # compiles kernels
    shares: dict[int, list[float]] = {10: [], 50: []}
    steps, records, structures = [], [], []
    for _ in range(rounds):
        (unrecorded, record), (_, with_ranks) = (record_cost(each, step, device, cycles) for each in (plain, whole))
        structure = max(with_ranks - record, 0.0) / 10
        steps.append(unrecorded)
        records.append(record)
        structures.append(structure)
        for every, samples in shares.items():
            samples.append(100 * (record + structure) / (every * unrecorded))
    return shares, statistics.median(steps), statistics.median(records), statistics.median(structures)


def record_cost(monitor: kq.Monitor, step, device: str, cycles: int) -> tuple[float, float]:
    """Seconds of a step without a record, and of a record."""
    with monitor:
        times = [seconds(step, 1, device) for _ in range(CYCLE * cycles)]
    *touched, unrecorded = (statistics.median(times[place::CYCLE]) for place in range(CYCLE))
    return unrecorded, sum(touched) - len(touched) * unrecorded


def ignore(alarm) -> None:
    """No line per alarm."""


def call_of(query, key) -> Call:
    """A causal attention call."""
    places = torch.arange(query.shape[-2], device=query.device)[None]
    return Call(torch.nn.Identity(), "", 0, query, key, None, RANK**-0.5, Tokens(places, places), causal=0)


def exactness(device: str):
    """The largest relative error of maxima against float64."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, key = (torch.randn(2, HEADS, 2048, RANK, device=device).to(dtype) * 4 for _ in range(2))
    largest = call_statistics(call_of(query, key))[LARGEST].double()
    hidden = torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)
    truth = torch.stack(
        [
            (query[:, head].double() @ key[:, head].double().mT * RANK**-0.5).masked_fill(hidden, -torch.inf).max()
            for head in range(HEADS)
        ]
    )
    return float(((largest - truth) / truth).abs().max())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=40, help="of four steps, per round")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where, name = ("H200", torch.cuda.get_device_name()) if device == "cuda" else ("CPU", "cpu")
    rows = [row(f"largest logits against float64, relative error, {where}", [exactness(device)], "", "1e-5")]
    batch, length = (1, 4096) if device == "cuda" else (8, 128)
    shares, step, record, structure = overheads(device, batch, length, options.rounds, options.cycles)
    print(
        f"step of {batch} × {length} tokens: {1e3 * step:.2f} ms; a record: {1e3 * record:.2f} ms;"
        f" a tenth of ranks and shares: {1e3 * structure:.2f} ms",
        flush=True,
    )
    size = f"{batch} × {length:,} tokens, {where}"
    for every, goal in ((50, "1"), (10, "5")):
        rows.append(row(f"monitor at every={every} over a training step, {size}", shares[every], "% more", goal))
    publish(f"monitor_{device}", rows, device=name)


if __name__ == "__main__":
    main()
