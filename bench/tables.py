"""Small tables: InContextClassifier against simple classifiers at their defaults; accuracy, log loss and calibration.

Thirteen tables: five of scikit-learn, and eight of a folder with the files named in `FILES`. Each is split three times
into at most 200 training rows and 200 test rows, stratified; numeric targets are cut at their quantiles. Peers are
scikit-learn's at their defaults, on standardised numbers and one-hot categories. The calibration error (ECE) is that of
the predicted class, over 15 equal bins of its probability. CPU time is that of fit and predict_proba.

    python bench/tables.py --data FOLDER --weights FILE [--splits N] [--ensemble N] [--npt]
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from harness import publish
from sklearn import datasets
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import keyquery as kq

ROWS, BINS, OURS = 200, 15, "in context"
# Name: file, options of pandas, column of the target, number of quantiles (0: classes).
FILES = {
    "Boston": ("uci_boston_data.txt.xz", {"sep": r"\s+", "header": None}, -1, 3),
    "Concrete": ("uci_concrete_data.txt.xz", {"sep": r"\s+", "header": None}, -1, 3),
    "Yacht": ("uci_yacht_data.txt.xz", {"sep": r"\s+", "header": None}, -1, 3),
    "Protein": ("uci_protein_data.txt.xz", {"sep": r"\s+", "header": None}, -1, 3),
    "Adult": ("uci_adult_train.csv.xz", {"header": None, "skipinitialspace": True, "na_values": "?"}, -1, 0),
    "Covertype": ("uci_covtype_subset15k.csv.xz", {}, "Cover_Type", 0),
    "HIGGS": ("higgs_subset_lightgbm_binary.train.xz", {"sep": "\t", "header": None}, 0, 0),
    "Poker": ("uci_poker_hand_training_true.data.xz", {}, -1, 0),
}


def tables(folder):
    """Name, frame of features and class codes of each table."""
    for name, quantiles in (("iris", 0), ("wine", 0), ("breast_cancer", 0), ("digits", 0), ("diabetes", 2)):
        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        yield name.replace("_", " "), pd.DataFrame(X), classes(pd.Series(y), quantiles)
    for name, (file, options, target, quantiles) in FILES.items():
        frame = pd.read_csv(folder / file, **options)
        target = frame.columns[target] if isinstance(target, int) else target
        features = frame.drop(columns=target)
        yield (
            name,
            features.set_axis([str(column) for column in features.columns], axis=1),
            classes(frame[target], quantiles),
        )


def classes(target, quantiles):
    return pd.qcut(target, quantiles, labels=False).to_numpy() if quantiles else pd.factorize(target, sort=True)[0]


def split(X, y, seed):
    """At most ROWS rows each for training and test; classes of too few rows are left out."""
    counts = np.bincount(y)
    kept = np.flatnonzero((counts / counts.sum() * ROWS >= 2)[y])
    size = min(ROWS, len(kept) // 2)
    train, test = train_test_split(kept, train_size=size, test_size=size, random_state=seed, stratify=y[kept])
    return X.iloc[train], X.iloc[test], y[train], y[test]


def methods(weights, ensemble, npt, seed):
    def prepared(model):
        numeric, named = make_column_selector(dtype_include="number"), make_column_selector(dtype_exclude="number")
        columns = make_column_transformer(
            (StandardScaler(), numeric), (OneHotEncoder(handle_unknown="ignore", sparse_output=False), named)
        )
        return make_pipeline(columns, model)

    found = {
        OURS: kq.InContextClassifier(weights, ensemble, random_state=seed, device="cpu"),
        "logistic regression": prepared(LogisticRegression()),
        "random forest": prepared(RandomForestClassifier(random_state=seed)),
        "gradient-boosted trees": prepared(HistGradientBoostingClassifier(random_state=seed)),
        "MLP": prepared(MLPClassifier(random_state=seed)),
    }
    return found | ({"NPT": kq.NPTClassifier(random_state=seed, device="cpu")} if npt else {})


def calibration_error(probabilities, truth):
    """Σ over bins of their share of rows times |accuracy − mean confidence|."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == truth
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    return sum(abs((right - confidence)[bins == one].sum()) for one in range(BINS)) / len(truth)


def measured(model, X_train, X_test, y_train, y_test):
    """Accuracy, log loss, calibration error and CPU seconds."""
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers that have not converged at their defaults
        probabilities = model.fit(X_train, y_train).predict_proba(X_test)
    seconds = time.process_time() - start
    index = np.searchsorted(model.classes_, y_test)
    probabilities = np.clip(probabilities, 1e-7, 1)
    return {
        "accuracy": float((probabilities.argmax(1) == index).mean()),
        "log loss": float(log_loss(y_test, probabilities / probabilities.sum(1, keepdims=True), labels=model.classes_)),
        "calibration error": float(calibration_error(probabilities, index)),
        "CPU time": seconds,
    }


def summary(results, metric, unit):
    """A row per method: the mean over tables, and the lowest and highest table; then every table, not shown."""
    rows, names = [], list(results)
    for method in results[names[0]]:
        values = [float(np.mean([one[metric] for one in results[name][method]])) for name in names]
        what = f"{metric} of {method}, {len(names)} small tables"
        facts = {"metric": metric, "method": method, "goal": "—", "unit": unit}
        rows.append({"what": what, "value": float(np.mean(values)), "low": min(values), "high": max(values), **facts})
        print(f"{what}: {rows[-1]['value']:.3f}", flush=True)
        for name, value in zip(names, values, strict=True):
            each = [one[metric] for one in results[name][method]]
            single = {"what": f"{metric} of {method}: {name}", "table": name, "value": value, "shown": False}
            rows.append({**single, "low": min(each), "high": max(each), **facts})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--ensemble", type=int, default=32)
    parser.add_argument("--npt", action="store_true", help="also NPTClassifier at its defaults, which is slow")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, X, y in tables(options.data):
        results[name] = {}
        for seed in range(options.splits):
            parts = split(X, y, seed)
            for method, model in methods(options.weights, options.ensemble, options.npt, seed).items():
                results[name].setdefault(method, []).append(measured(model, *parts))
        means = {method: np.mean([one["accuracy"] for one in each]) for method, each in results[name].items()}
        print(name, len(parts[0]), {method: round(float(mean), 3) for method, mean in means.items()}, flush=True)
    units = {"accuracy": "", "log loss": "nats", "calibration error": "", "CPU time": "s"}
    rows = [row for metric, unit in units.items() for row in summary(results, metric, unit)]
    publish("tables", rows, splits=options.splits, ensemble=options.ensemble, rows_of_each=ROWS)


if __name__ == "__main__":
    main()
