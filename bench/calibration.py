"""Calibration of classifiers that no other bench has: TransportClassifier, NPTClassifier and the types of EventModel.

Tables of scikit-learn, split three times (NPTClassifier: once, and not digits) into at most 400 training rows and as
many test rows, stratified; peers at their defaults on standardised numbers. Events: Stack Overflow badges and purchases
of CDNOW, 500 groups to learn from and 1,000 others, each cut at a random event that is to be predicted; peers are the
Markov chain with add-one smoothing, and boosted trees on the last three types and gaps. The calibration error (ECE) is
that of the predicted class over 15 equal bins of its probability. Series: bench/series.py; in context: bench/tables.py.

    python bench/calibration.py --data FOLDER
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from harness import publish
from keyquery_studies.common.events import read_badges, read_cdnow
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tables import calibration_error, measured

import keyquery as kq

ROWS, GROUPS, TESTED, SPLITS, LAST = 400, 500, 1000, 3, 3
TABLES = ("iris", "wine", "breast_cancer", "digits")
METRICS = {"accuracy": "", "log loss": "nats", "calibration error": "", "CPU time": "s"}


def of_tables():
    """{table: {method: results of each split}}."""
    results = {}
    for name in TABLES:
        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        size = min(ROWS, len(y) // 2)
        for seed in range(SPLITS):
            parts = train_test_split(X, y, train_size=size, test_size=size, random_state=seed, stratify=y)
            models = {
                "TransportClassifier": kq.TransportClassifier(random_state=seed, device="cpu"),
                "logistic regression": make_pipeline(StandardScaler(), LogisticRegression()),
                "MLP": make_pipeline(StandardScaler(), MLPClassifier(random_state=seed)),
            }
            if seed == 0 and name != "digits":
                models["NPTClassifier"] = kq.NPTClassifier(random_state=seed, device="cpu")
            for method, model in models.items():
                each = results.setdefault(name.replace("_", " "), {}).setdefault(method, [])
                each.append(measured(model, *parts))
                print(name, seed, method, each[-1], flush=True)
    return results


def cut(events, groups, generator):
    """Histories of groups up to a random event, as columns, and the type of that event."""
    rows, truth = [], []
    for group in groups:
        own = np.flatnonzero(events.groups == group)
        own = own[np.argsort(events.times[own], kind="stable")]
        end = int(generator.integers(1, len(own)))
        rows.append(own[:end])
        truth.append(events.types[own[end]])
    rows = np.concatenate(rows)
    return (events.types[rows], events.times[rows], events.groups[rows]), np.array(truth)


def features(types, times, groups, classes):
    """The last types and gaps of each event's history, the event itself among them; −1 and NaN where there is none."""
    codes, wanted = np.searchsorted(classes, types), []
    order = np.lexsort((times, groups))
    codes, times, groups = codes[order], times[order], groups[order]
    for back in range(LAST):
        before = np.arange(len(codes)) - back
        inside = (before >= 0) & (groups[before] == groups)
        wanted.append(np.where(inside, codes[before], -1))
        earlier = before - 1
        inside = (earlier >= 0) & (groups[earlier] == groups)
        wanted.append(np.where(inside, times[before] - times[earlier], np.nan))
    following = np.append(groups[1:] == groups[:-1], False)
    last = np.append(groups[1:] != groups[:-1], True)
    return np.column_stack(wanted), codes, following, last, groups


def of_trees(train, test, classes):
    X, codes, following, _, _ = features(*train, classes)
    model = HistGradientBoostingClassifier(categorical_features=list(range(0, 2 * LAST, 2)), random_state=0)
    model.fit(X[following], codes[np.flatnonzero(following) + 1])
    X, _, _, last, groups = features(*test, classes)
    place = {group: row for row, group in zip(np.flatnonzero(last), groups[last], strict=True)}
    probabilities = np.zeros((len(place), len(classes)))
    order = list(dict.fromkeys(test[2].tolist()))
    probabilities[:, model.classes_] = model.predict_proba(X[[place[group] for group in order]])
    return probabilities


def of_chain(train, test, classes):
    _, codes, following, _, _ = features(*train, classes)
    counts = np.ones((len(classes), len(classes)))
    np.add.at(counts, (codes[following], codes[np.flatnonzero(following) + 1]), 1)
    _, codes, _, last, groups = features(*test, classes)
    final = dict(zip(groups[last].tolist(), codes[last], strict=True))
    return (counts / counts.sum(1, keepdims=True))[[final[group] for group in dict.fromkeys(test[2].tolist())]]


def of_events(folder):
    results = {}
    for name, events in (
        ("badges", read_badges(folder / "stackoverflow_badges.npz")),
        ("CDNOW", read_cdnow(folder / "cdnow_master.txt.xz")),
    ):
        generator = np.random.default_rng(0)
        names, counts = np.unique(events.groups, return_counts=True)
        names = generator.permutation(names[counts >= 3])
        chosen = np.isin(events.groups, names[:GROUPS])
        train = events.types[chosen], events.times[chosen], events.groups[chosen]
        classes = np.unique(train[0])
        test, truth = cut(events, names[GROUPS : GROUPS + TESTED], generator)
        known = np.isin(truth, classes)  # an unseen type cannot be predicted: an error of all

        def ours(train, test, classes):
            return kq.EventModel(random_state=0, device="cpu").fit(*train).predict_proba(*test)

        for method, predict in (("EventModel", ours), ("boosted trees", of_trees), ("Markov chain", of_chain)):
            start = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # types of the test that were not seen
                probabilities = np.clip(predict(train, test, classes), 1e-7, 1)
            row = {"CPU time": time.process_time() - start}
            index = np.where(known, np.searchsorted(classes, truth).clip(max=len(classes) - 1), -1)
            right = probabilities[np.arange(len(index)), index][known]
            row |= {"accuracy": float((probabilities.argmax(1) == index).mean()), "log loss": -np.log(right).mean()}
            row["calibration error"] = float(calibration_error(probabilities, index))
            results.setdefault(name, {})[method] = [row]
            print(name, method, row, flush=True)
    return results


def rows_of(results, what):
    """A row per method, set and metric; the mean over splits, and the lowest and highest."""
    rows = []
    for name, by_method in results.items():
        for method, splits in by_method.items():
            for metric, unit in METRICS.items():
                values = [float(split[metric]) for split in splits]
                row = {"what": f"{metric} of {method}: {name}, {what}", "unit": unit, "goal": "—"}
                row |= {"value": float(np.mean(values)), "low": min(values), "high": max(values)}
                rows.append(row | {"shown": metric == "calibration error"})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = rows_of(of_events(options.data), f"{TESTED:,} next events") + rows_of(of_tables(), f"at most {ROWS} rows")
    publish("calibration", rows, rows_of_each=ROWS, groups=GROUPS, splits=SPLITS)


if __name__ == "__main__":
    main()
