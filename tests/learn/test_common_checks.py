"""scikit-learn's `check_estimator` of estimators whose X is not a table of numbers: what cannot hold, and why."""

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import keyquery as kq

# Checks that fit to a random array (n, columns), and a vector y.
FITTED = [
    "check_all_zero_sample_weights_error",
    "check_complex_data",
    "check_dict_unchanged",
    "check_dont_overwrite_parameters",
    "check_dtype_object",
    "check_estimator_sparse_array",
    "check_estimator_sparse_matrix",
    "check_estimator_sparse_tag",
    "check_estimators_dtypes",
    "check_estimators_empty_data_messages",
    "check_estimators_fit_returns_self",
    "check_estimators_nan_inf",
    "check_estimators_overwrite_params",
    "check_estimators_pickle",
    "check_f_contiguous_array_estimator",
    "check_fit1d",
    "check_fit2d_1feature",
    "check_fit2d_1sample",
    "check_fit2d_predict1d",
    "check_fit_check_is_fitted",
    "check_fit_idempotent",
    "check_fit_score_takes_y",
    "check_methods_sample_order_invariance",
    "check_methods_subset_invariance",
    "check_n_features_in",
    "check_n_features_in_after_fitting",
    "check_pipeline_consistency",
    "check_positive_only_tag_during_fit",
    "check_readonly_memmap_input",
    "check_sample_weight_equivalence_on_dense_data",
    "check_sample_weights_list",
    "check_sample_weights_not_an_array",
    "check_sample_weights_not_overwritten",
    "check_sample_weights_pandas_series",
    "check_sample_weights_shape",
]
EVENTS = dict.fromkeys(FITTED, "X is a column of event types, or a frame of types, times and groups, and not an array")
IMAGES = dict.fromkeys(FITTED, "X are images and y their captions, and not numbers")
TEXTS = dict.fromkeys(FITTED, "X are queries and passages, texts, and fit takes which of them are relevant")
NO_DIRECTION = "X are vectors that are compared by their cosine: a vector of zeros, which the check has, is refused"
VECTORS = {
    "check_fit_score_takes_y": "fit takes features and labels; they are the items to rank, and not X and y",
    "check_estimators_dtypes": NO_DIRECTION,
}
FEW = "more neighbours than items are refused, so that no list is shorter than was asked for"
RECIPROCAL = {
    **VECTORS,
    **dict.fromkeys(
        (
            "check_n_features_in_after_fitting",
            "check_estimators_nan_inf",
            "check_fit2d_1sample",
            "check_fit2d_1feature",
        ),
        FEW,
    ),
}
PAIRS = {**VECTORS, "check_fit2d_1sample": "two items must share a label, and the error says so in these words"}


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "expected", "passed"),
    [
        (lambda: kq.EventModel(width=8, epochs=1, device="cpu"), EVENTS, 12),
        (lambda: kq.VisualParser(size=8, patch=4, width=8, heads=2, epochs=1, device="cpu"), IMAGES, 11),
        (lambda: kq.HeadReranker(kq.models.DECODER, device="cpu"), TEXTS, 11),
        (lambda: kq.KReciprocalReranker(device="cpu"), RECIPROCAL, 33),
        (lambda: kq.DiffusionReranker(neighbours=2, device="cpu"), VECTORS, 36),
        (lambda: kq.AlphaQueryExpansion(device="cpu"), VECTORS, 36),
        (lambda: kq.AffinityReranker(device="cpu"), VECTORS, 36),
        pytest.param(
            lambda: kq.Reranker(steps=2, device="cpu", random_state=0), PAIRS, 35, marks=pytest.mark.slow
        ),  # dozens of trainings
    ],
    ids=["events", "images", "heads", "reciprocal", "diffusion", "expansion", "affinity", "reranker"],
)
def test_what_fails_is_listed_with_its_reason(build, expected, passed):
    results = check_estimator(build(), expected_failed_checks=expected, on_fail=None)
    assert [(one["check_name"], one["exception"]) for one in results if one["status"] == "failed"] == []
    assert sum(one["status"] == "passed" for one in results) >= passed


def table(rows=40, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"size": rng.normal(size=rows), "width": rng.normal(size=rows)})
    return frame, np.where(frame["size"] > 0, "yes", "no")


SMALL_TABLES = [
    kq.NPTClassifier(embedding=4, depth=2, heads=2, steps=5, random_state=0, device="cpu"),
    kq.TransportClassifier(epochs=2, random_state=0, device="cpu"),
]


@pytest.mark.parametrize("model", SMALL_TABLES, ids=["npt", "transport"])
@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_frames_that_a_pipeline_sets_as_output_are_read(model, kind):
    if kind == "polars":
        pytest.importorskip("polars")
    X, y = table()
    line = make_pipeline(StandardScaler(), clone(model)).set_output(transform=kind).fit(X, y)
    assert list(line[-1].feature_names_in_) == ["size", "width"]
    plain = make_pipeline(StandardScaler(), clone(model)).fit(X, y)
    assert np.array_equal(line.predict_proba(X), plain.predict_proba(X))
    with config_context(transform_output=kind):
        assert np.array_equal(make_pipeline(StandardScaler(), clone(model)).fit(X, y).predict(X), line.predict(X))


@pytest.mark.parametrize("model", SMALL_TABLES, ids=["npt", "transport"])
def test_polars_are_read_as_pandas(model):
    polars = pytest.importorskip("polars")
    X, y = table()
    expected = model.fit(X, y).predict_proba(X)
    same = model.fit(polars.from_pandas(X), polars.Series(y)).predict_proba(polars.from_pandas(X))
    assert np.array_equal(same, expected)
    with pytest.raises(TypeError, match=r"lazy frame, whose rows are not known yet: pass X.collect\(\)"):
        model.fit(polars.from_pandas(X).lazy(), y)


def test_weights_of_tables_decide_what_is_learned():
    """Every row is there twice, once with the opposite label: the heavier of the two decides."""
    X, y = table(30)
    both, labels = pd.concat([X, X]), np.concatenate([y, np.where(y == "yes", "no", "yes")])
    model = kq.NPTClassifier(embedding=8, depth=2, heads=2, steps=30, random_state=0, device="cpu")
    right = model.fit(both, labels, sample_weight=np.repeat([1.0, 0.0], 30))
    alone = kq.NPTClassifier(**model.get_params()).fit(X, y)
    assert np.array_equal(right.predict_proba(X), alone.predict_proba(X))  # rows of weight 0 are left out
    assert set(right.context_rows_) <= set(range(30))
    heavy = model.fit(both, labels, sample_weight=np.repeat([0.05, 1.0], 30)).predict_proba(X)
    light = model.fit(both, labels, sample_weight=np.repeat([1.0, 0.05], 30)).predict_proba(X)
    of_yes = list(model.classes_).index("yes")
    assert (light - heavy)[y == "yes", of_yes].mean() > 0.2


def test_weights_of_classes_and_of_values():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 1)), np.repeat(["often", "seldom"], [54, 6])
    small = {"embedding": 4, "depth": 2, "heads": 2, "steps": 40, "random_state": 0, "device": "cpu"}
    plain = kq.NPTClassifier(**small).fit(X, y).predict_proba(X)[:, 1].mean()
    balanced = kq.NPTClassifier(**small, class_weight="balanced").fit(X, y).predict_proba(X)[:, 1].mean()
    assert plain < 0.3
    assert balanced > plain + 0.15
    values, noise = np.repeat([0.0, 1.0], 30), np.zeros((60, 1))
    high = kq.NPTRegressor(**small).fit(noise, values, sample_weight=np.repeat([1.0, 9.0], 30)).predict(noise[:1])
    low = kq.NPTRegressor(**small).fit(noise, values, sample_weight=np.repeat([9.0, 1.0], 30)).predict(noise[:1])
    assert high > low + 0.3
    with pytest.raises(ValueError, match=r"[Ss]ample.weight"):
        kq.NPTRegressor(**small).fit(noise, values, sample_weight=np.zeros(60))
