"""`make fuzz`: many cases of every reader, in processes of their own, so that a crash is a finding and not the end.

python -m tests.fuzz.run --cases 100000 --workers 2 --seed 0
python -m tests.fuzz.run --seed 0 --case 4711      one case again, with its traceback
"""

import argparse
import faulthandler
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.fuzz.guard import Broken, watched

STUCK = 180  # seconds of a case after which its process ends, whatever it does
SPARE = 4 * 2**30  # address space that a process may take beyond what it has at the start


class Bench:
    """Real files of each reader in a folder of its own, one of them changed for every case."""

    def __init__(self, folder, names=None):
        from tests.fuzz.readers import READERS

        self.readers = {name: reader for name, reader in READERS.items() if names is None or name in names}
        self.names, self.folder, self.original = list(self.readers), Path(folder), {}
        for number, (name, reader) in enumerate(self.readers.items()):
            place = self.folder / str(number)
            place.mkdir()
            reader.make(place)
            self.original[name] = (place, (place / reader.file).read_bytes())
            reader.read(place)  # as it is, it can be read; and what is imported on use is now there

    def case(self, number, seed):
        """Read case `number`; Broken where a promise is not kept."""
        name = self.names[number % len(self.names)]
        self.one(name, random.Random(f"{seed} {number}"))

    def one(self, name, chance):
        reader, (place, original) = self.readers[name], self.original[name]
        changed = reader.change(chance, original)
        file = place / reader.file
        file.unlink(missing_ok=True)
        file.write_bytes(changed)
        with watched(place, len(changed), reader.packed):
            reader.read(place)


def work(first, cases, step, seed, status):
    """Cases first, first + step, …; what breaks is told on stdout, where it stands in the file `status`."""
    import torch

    torch.set_num_threads(1)
    sys.setrecursionlimit(1000)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, used + SPARE))
        for number in range(first, cases, step):
            Path(status).write_text(str(number))
            faulthandler.dump_traceback_later(STUCK, exit=True)
            try:
                bench.case(number, seed)
            except (Broken, AssertionError) as error:
                told = {"case": number, "reader": bench.names[number % len(bench.names)], "what": str(error)}
                print(json.dumps(told), flush=True)
            faulthandler.cancel_dump_traceback_later()


def lane(first, given, folder):
    """One lane of cases to its end, over crashes; how many promises were broken."""
    status, found = Path(folder, f"status{first}"), 0
    while first < given.cases:
        command = [sys.executable, "-m", "tests.fuzz.run", "--lane", str(first), str(given.workers), str(status)]
        command += ["--cases", str(given.cases), "--seed", str(given.seed)]
        with (
            open(Path(folder, f"err{first}"), "w+") as err,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as process,
        ):
            for line in process.stdout:
                print(line, end="", flush=True)
                found += 1
            if process.wait() == 0:
                break
            err.seek(0)
            last, first = (err.read().strip().splitlines() or [""])[-1], int(status.read_text())
        print(json.dumps({"case": first, "what": f"the process ended with {process.returncode}: {last}"}), flush=True)
        first, found = first + given.workers, found + 1
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--lane", nargs=3)
    given = parser.parse_args()
    if given.lane:
        work(int(given.lane[0]), given.cases, int(given.lane[1]), given.seed, given.lane[2])
        return 0
    if given.case is not None:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(folder)
            print(bench.names[given.case % len(bench.names)])
            try:
                bench.case(given.case, given.seed)
            except (Broken, AssertionError):
                traceback.print_exc()
        return 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.workers) as pool:
        found = sum(pool.map(lambda first: lane(first, given, folder), range(given.workers)))
    spent = time.monotonic() - start
    print(f"{given.cases:,} cases, seed {given.seed}: {found} broken promises, {given.cases / spent:.0f} cases/s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
