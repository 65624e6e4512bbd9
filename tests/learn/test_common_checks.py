"""scikit-learn's `check_estimator` of every estimator: what cannot hold, and why."""

import pytest
from sklearn.utils.estimator_checks import check_estimator

import keyquery as kq

# What holds also where X is no array of numbers, and no check can fit.
UNFITTED = {
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimator_tags_renamed",
    "check_estimators_unfitted",
    "check_get_params_invariance",
    "check_mixin_order",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_set_params",
    "check_valid_tag_types",
}
REPEATED = {
    "check_sample_weight_equivalence_on_dense_data": "a sample of weight 2 is drawn once per epoch or threshold, two "
    "copies twice, and may be held out"
}
ANY_LENGTH = "a row of X is a series of any length, so that there is no number of features"
RIDGE = REPEATED | {
    "check_n_features_in": ANY_LENGTH,
    "check_n_features_in_after_fitting": ANY_LENGTH,
    "check_classifiers_train": ANY_LENGTH + ": all else of this check is tested in tests/learn/series",
}
SERIES = RIDGE | {"check_methods_subset_invariance": "it wants 1e-7, and the network computes in float32"}
VECTORS = {
    "check_fit_score_takes_y": "fit takes features and labels; they are the items to rank, and not X and y",
    "check_estimators_dtypes": "vectors are compared by their cosine: one of zeros, which the check has, is refused",
}
RECIPROCAL = VECTORS | dict.fromkeys(
    (
        "check_n_features_in_after_fitting",
        "check_estimators_nan_inf",
        "check_fit2d_1sample",
        "check_fit2d_1feature",
    ),
    "more neighbours than items are refused, so that no list is shorter than was asked for",
)
PAIRS = VECTORS | {"check_fit2d_1sample": "two items must share a label, and the error says so in these words"}
CPU = {"device": "cpu", "random_state": 0}
NPT = {"embedding": 4, "depth": 2, "heads": 2, "steps": 100, **CPU}
NETWORK = {"width": 8, "heads": 2, "depth": 1, **CPU}
CHECKED = {  # with expected failures, and the number of checks that must pass; slow: dozens of trainings
    "ridge": (kq.ConvolutionRidgeClassifier(features=168, **CPU), RIDGE, 41),
    "reciprocal": (kq.KReciprocalReranker(device="cpu"), RECIPROCAL, 33),
    "diffusion": (kq.DiffusionReranker(neighbours=2, device="cpu"), VECTORS, 36),
    "expansion": (kq.AlphaQueryExpansion(device="cpu"), VECTORS, 36),
    "affinity": (kq.AffinityReranker(device="cpu"), VECTORS, 36),
}
SLOW = {
    "series": (kq.SeriesClassifier(**NETWORK, epochs=6, batch_size=64, lr=0.02), SERIES, 41),
    "classifier": (kq.NPTClassifier(**NPT), REPEATED, 41),
    "regressor": (kq.NPTRegressor(**NPT), REPEATED, 41),
    "circle": (kq.TransportClassifier("circle", epochs=20, **CPU), REPEATED, 51),
    "simplex": (kq.TransportClassifier("simplex", epochs=20, **CPU), REPEATED, 51),
    "learned": (kq.TransportClassifier("learned", epochs=20, **CPU), REPEATED, 51),
    "reranker": (kq.Reranker(steps=2, **CPU), PAIRS, 35),
}


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CHECKED, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_what_fails_is_listed_with_its_reason(name, monkeypatch):
    monkeypatch.setattr("keyquery.learn.series.classifier.BATCHES", 1)
    model, expected, passed = (CHECKED | SLOW)[name]
    results = check_estimator(model, expected_failed_checks=expected, on_fail=None)
    assert [(result["check_name"], result["exception"]) for result in results if result["status"] == "failed"] == []
    assert sum(result["status"] == "passed" for result in results) >= passed


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model",
    [
        kq.EventModel(width=8, epochs=1, device="cpu"),
        kq.VisualParser(size=8, patch=4, width=8, heads=2, epochs=1, device="cpu"),
        kq.HeadReranker(kq.models.DECODER, device="cpu"),
    ],
    ids=["events", "images", "heads"],
)
def test_estimators_of_other_data_pass_what_needs_no_fit(model):
    results = check_estimator(model, on_fail=None)
    assert {result["check_name"] for result in results if result["status"] == "passed"} >= UNFITTED
