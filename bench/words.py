"""Counting co-occurrence: a million words on one core, and memory while a file streams by.

Words are drawn by Zipf's law from 1,000 (exponent 1.1), written to files of 1, 4 and 16 million words; pairs within 5
words are counted, before and after apart. Before it is timed, a small text is counted by two loops. CPU seconds of one
thread, reading and splitting of the text among them. Memory (Linux): the peak of a process of its own, beyond what it
had before it began to count; it is to grow with the pairs that differ, not with the file.

    python bench/words.py [--out FILE]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from harness import RESULTS, cpu_seconds, publish, row

import keyquery as kq

SEED, WORDS, WINDOW = 0, 1_000, 5
MILLION = 1_000_000
PEAK = """
import pathlib, keyquery as kq
from_text, status = kq.Cooccurrence.from_text, pathlib.Path("/proc/self/status")
def kilobytes(name):
    return int(status.read_text().split(name + ":")[1].split()[0])
from_text("a warm up", 1)
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = kilobytes("VmRSS")
counts = from_text(pathlib.Path({path!r}), {window})
print(kilobytes("VmHWM") - before, counts.tokens, len(counts.values()))
"""


def write(path, count):
    """So many words, drawn by Zipf's law."""
    rng, share = np.random.default_rng(SEED), 1 / np.arange(1, WORDS + 1) ** 1.1
    with path.open("w") as file:
        for _ in range(count // MILLION):
            drawn = rng.choice(WORDS, MILLION, p=share / share.sum())
            file.write(" ".join(f"w{word}" for word in drawn) + "\n")


def check():
    """Pairs by two loops."""
    words = [f"w{word}" for word in np.random.default_rng(SEED).integers(50, size=2_000)]
    truth = Counter((a, b) for i, a in enumerate(words) for b in words[i + 1 : i + 1 + WINDOW])
    found = kq.Cooccurrence.from_text(" ".join(words), WINDOW)
    dense, names = found.dense(), found.vocabulary
    told = {(names[i], names[j]): int(dense[i, j]) for i, j in dense.nonzero().tolist()}
    assert told == dict(truth), "pairs are off"


def peak(path):
    """Peak memory in MB that counting a file takes beyond what was there before, and how many pairs differ."""
    command = [sys.executable, "-c", PEAK.format(path=str(path), window=WINDOW)]
    used, _, pairs = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(used) / 1e3, int(pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the results there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    check()
    with tempfile.TemporaryDirectory() as folder:
        files = {count: Path(folder, f"{count}.txt") for count in (1, 4, 16)}
        for count, path in files.items():
            write(path, count * MILLION)
        taken = cpu_seconds(lambda: kq.Cooccurrence.from_text(files[1], WINDOW), 5)
        rows = [row("co-occurrence of a million words, window 5, one core", taken, "CPU s", "≤ 5 CPU s")]
        used = {count: peak(files[count]) for count in (4, 16)}
        sizes = {count: path.stat().st_size / 1e6 for count, path in files.items()}
    for count, (megabytes, pairs) in used.items():
        what = (
            f"memory to count {count} million words, a file of {sizes[count]:.0f} MB, {pairs / 1e6:.2f} million pairs"
        )
        rows.append(row(what, [megabytes], "MB", "—"))
    (most, many), (least, few) = used[16], used[4]
    what = f"the same, of 16 million words over 4 million, which have {many / few:.2f} × the pairs that differ"
    rows.append(row(what, [most / least], "×", "—"))
    publish("words", rows, seed=SEED, words=WORDS, window=WINDOW, machine="one CPU thread")
    if options.out is not None:
        shutil.copy(RESULTS / "words.json", options.out)


if __name__ == "__main__":
    main()
