"""Counting co-occurrence: a million words on one core, and memory while a file streams by.

Words are drawn by Zipf's law from 2,000 (exponent 1.1), written to files of 1, 4 and 16 million words; pairs within 5
words are counted, before and after apart. Before it is timed, a small text is counted by two loops. CPU seconds of one
thread, reading and splitting of the text among them. Memory: peak of a process of its own, over that of one that only
imports keyquery; beyond some millions of words it grows with the pairs that differ alone.

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

SEED, WORDS, WINDOW = 0, 2_000, 5
MILLION = 1_000_000
PEAK = """
import pathlib, resource, keyquery as kq
kq.Cooccurrence
{}
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
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


def peak(path=None):
    """Peak memory in MB of a process that counts a file, or only imports."""
    work = "" if path is None else f"kq.Cooccurrence.from_text(pathlib.Path({str(path)!r}), {WINDOW})"
    command = [sys.executable, "-c", PEAK.format(work)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1e3


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
        base = peak()
        used = {count: peak(path) - base for count, path in files.items()}
        sizes = {count: path.stat().st_size / 1e6 for count, path in files.items()}
    for count in (4, 16):
        what = f"co-occurrence of {count} million words, a file of {sizes[count]:.0f} MB: memory over import"
        rows.append(row(what, [used[count]], "MB", "—"))
    rows.append(row("the same, of 16 million words over 4 million", [used[16] / used[4]], "×", "≤ 1.2 ×"))
    publish("words", rows, seed=SEED, words=WORDS, window=WINDOW, machine="one CPU thread")
    if options.out is not None:
        shutil.copy(RESULTS / "words.json", options.out)


if __name__ == "__main__":
    main()
