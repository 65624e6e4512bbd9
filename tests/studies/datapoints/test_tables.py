"""Tables and folds of the study of datapoints, and models of scikit-learn, on files like the real ones."""

import lzma
from hashlib import sha256

import numpy as np
import pytest
import torch
from keyquery_studies.datapoints import baselines
from keyquery_studies.datapoints.baselines import MODELS, Baseline, numbers_of, trees_of
from keyquery_studies.datapoints.folds import fold_of
from keyquery_studies.datapoints.lookups import VARIANTS, LookUp, doubled, nearest, scored
from keyquery_studies.datapoints.tables import BREAST, TABLES, load_kept, prepare_tables, split_of

from keyquery.learn.inputs.tables import Rows

# Folds


# Of rows, classes, test and validation share: digests of all folds, which trainings on file were made on.
FOLDS = {
    (308, 0, 0.1, 0.2): "43a0929f8077e856",
    (60, 2, 0.1, 0.2): "b49b82a9c02b494d",
    (308, 4, 0.1, 0.2): "0a2ecd8d4083b76c",
    (569, 0, 0.2, 0.1): "f7114840d7c8308c",
    (569, 4, 0.2, 0.1): "d1c94898d6115130",
}


@pytest.mark.parametrize(("count", "kinds", "test", "held"), FOLDS)
def test_folds_stay_the_published_ones(count, kinds, test, held):
    classes = 3 * np.random.default_rng(count).integers(0, kinds, count) if kinds else None
    digest = sha256()
    for number in range(int(1 / test)):
        for part in fold_of(number, count, test, held, classes):
            digest.update(part.astype("<i8").tobytes() + b"|")
    assert digest.hexdigest()[:16] == FOLDS[count, kinds, test, held]


def test_there_is_no_eleventh_fold():
    with pytest.raises(ValueError, match="fold"):
        fold_of(10, 100, 0.1, 0.2)


# Files


def written(folder, name, lines):
    (folder / f"{name}.xz").write_bytes(lzma.compress("\n".join(lines).encode() + b"\n\n"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    boston = (" 0.1  18.0  2.3  0  0.5 6.5 65.2 4.0   1  296.0  15.3 396.9 4.9  24.0",
              " 0.2  18.0  2.3  1  0.5 6.5 65.2 4.0  24  296.0  15.3 396.9 4.9  21.6")  # fmt: skip
    written(folder, "uci_boston_data.txt", boston)
    written(folder, "uci_concrete_data.txt", ["540.0 \t0.0 \t79.99 ", "332.5 \t142.5 \t40.27 "])
    written(folder, "uci_adult_train.csv", ["39, State-gov, <=50K", "50, ?, >50K", "38, Private, <=50K"])
    written(folder, "uci_adult_test.csv", ["25, Private, <=50K.", "?, Local-gov, >50K."])
    poker = ("S1,R1,S2,R2,S3,R3,S4,R4,S5,R5,ORD\r", "1,10,1,11,1,13,1,12,1,1,9\r", "2,11,2,13,2,10,2,12,2,1,0\r")
    written(folder, "uci_poker_hand_training_true.data", poker)
    header = "Elevation,Wilderness_Area1,Wilderness_Area2,Soil_Type1,Soil_Type2,Cover_Type"
    written(folder, "uci_covtype_subset15k.csv", [header, "3351,1,0,0,1,1", "2732,0,1,0,0,2", "2596,0,1,1,0,5"])
    written(folder, "higgs_subset_lightgbm_binary.train", ["1\t0.869\t-0.635", "0\t0.908\t0.329"])
    written(folder, "higgs_subset_lightgbm_binary.test", ["1\t0.644\t0.247"])
    return folder


@pytest.fixture(scope="module")
def tables(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    names = ["boston", "concrete", "adult", "poker", "forest", "higgs"]
    found = prepare_tables(source, folder, names)
    return {name: load_kept(folder, name, found[name]["digest"]) for name in names}


def test_numbers_that_are_names_become_categories(tables):
    boston = tables["boston"]
    assert [number for number, kind in enumerate(boston.kinds) if kind == "categorical"] == [3, 8]
    assert boston.categories[8] == ("1", "24")
    assert boston.values[13].tolist() == [24.0, 21.6]
    poker = tables["poker"]
    assert set(poker.kinds) == {"categorical"}
    assert (poker.target, poker.columns[10], poker.categories[10]) == (10, "ORD", ("0", "9"))
    assert poker.values[1].tolist() == [0, 1]


def test_two_files_are_one_table_and_gaps_stay_gaps(tables):
    adult = tables["adult"]
    assert len(adult) == 5
    assert adult.categories[2] == ("<=50K", ">50K")
    assert adult.values[2].tolist() == [0, 1, 0, 0, 1]
    assert adult.categories[1] == ("Local-gov", "Private", "State-gov")
    assert adult.values[1].tolist() == [2, -1, 1, 1, 0]
    assert np.isnan(adult.values[0]).tolist() == [False] * 4 + [True]


def test_columns_of_zeros_and_ones_are_one_category(tables):
    forest = tables["forest"]
    assert forest.columns == ("Soil_Type", "Wilderness_Area", "Elevation", "Cover_Type")
    assert forest.values[0].tolist() == [1, -1, 0]
    assert forest.values[1].tolist() == [0, 1, 1]
    assert forest.categories[3] == ("1", "2", "5")


def test_a_target_may_stand_first(tables):
    higgs = tables["higgs"]
    assert (higgs.target, higgs.kinds[0], higgs.values[0].tolist()) == (0, "categorical", [1, 0, 1])


def test_tables_that_are_not_there_are_named(source, tmp_path):
    with pytest.raises(FileNotFoundError, match="uci_protein_data"):
        prepare_tables(source, tmp_path, ["boston", "protein"])
    assert not (tmp_path / "tables.json").exists()
    with pytest.raises(ValueError, match="table"):
        prepare_tables(source, tmp_path, ["none"])


def test_breast_cancer_comes_with_scikit_learn_and_goes_on_as_a_file(tmp_path):
    pytest.importorskip("sklearn")
    facts = prepare_tables(None, tmp_path / "here", ["breast"])
    assert (facts["breast"]["rows"], facts["breast"]["features"], facts["breast"]["classes"]) == (569, 30, 2)
    other = tmp_path / "there"
    other.mkdir()
    (other / BREAST).write_bytes((tmp_path / "here" / BREAST).read_bytes())
    assert prepare_tables(other, tmp_path / "again", ["breast"]) == facts


def test_large_tables_have_one_split():
    assert {name: source.folds for name, source in TABLES.items()} == {
        "boston": 10, "yacht": 10, "concrete": 10, "breast": 10,
        "protein": 1, "adult": 1, "poker": 1, "forest": 1, "higgs": 1,
    }  # fmt: skip


# Models of scikit-learn


@pytest.fixture(scope="module")
def breast(tmp_path_factory):
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("breast")
    facts = prepare_tables(None, folder, ["breast"])["breast"]
    table = load_kept(folder, "breast", facts["digest"])
    return folder, facts["digest"], table, split_of("breast", table, 0)


def test_features_are_standardised_by_what_is_learned_from(breast):
    _, _, table, fold = breast
    parts = numbers_of(table, fold)
    assert parts.features[0].mean(0) == pytest.approx(np.zeros(30), abs=1e-9)
    assert parts.features[0].std(0) == pytest.approx(np.ones(30))
    assert abs(parts.features[2].mean(0)).max() > 0.01
    assert [len(target) for target in parts.targets] == [398, 114, 57]


def test_categories_are_ones_and_zeros_for_distances_and_codes_for_trees(tables):
    adult = tables["adult"]
    fold = fold_of(0, 5, 0.2, 0.2)
    wide, trees = numbers_of(adult, fold), trees_of(adult, fold)
    every = np.concatenate(wide.features)[np.argsort(np.concatenate(fold))]
    assert every[:, 1:].tolist() == [[0, 0, 1], [0, 0, 0], [0, 1, 0], [0, 1, 0], [1, 0, 0]]
    assert np.isfinite(every).all()
    every = np.concatenate(trees.features)[np.argsort(np.concatenate(fold))]
    assert trees.categorical == [False, True]
    assert np.isnan(every).tolist() == [[False, False], [False, True], [False, False], [False, False], [True, False]]


def test_neighbours_are_chosen_by_what_is_held_out_and_tested_on_the_rest(breast):
    neighbours = pytest.importorskip("sklearn.neighbors")
    folder, digest, table, fold = breast
    row = Baseline(table="breast", digest=digest, fold=0, model="neighbours").run(folder, "cpu")
    x, y = numbers_of(table, fold)[:2]
    costs = {}
    for count in baselines.NEIGHBOURS["count"]:
        for weights in baselines.NEIGHBOURS["weights"]:
            model = neighbours.KNeighborsClassifier(count, weights=weights).fit(x[0], y[0])
            held = np.clip(model.predict_proba(x[1]), 1e-6, 1)
            held /= held.sum(1, keepdims=True)
            costs[count, weights] = -np.log(held[np.arange(114), y[1]]).mean(), model
    best = min(costs, key=lambda setting: costs[setting][0])
    assert row["chosen"] == dict(zip(("count", "weights"), best, strict=True))
    assert row["accuracy"] == pytest.approx(costs[best][1].score(x[2], y[2]))


@pytest.mark.parametrize("model", MODELS)
def test_models_do_better_than_the_commoner_class(breast, model, monkeypatch):
    monkeypatch.setitem(baselines.BOOSTING, "iterations", 20)
    monkeypatch.setitem(baselines.BOOSTING, "learning_rate", (0.1,))
    monkeypatch.setitem(baselines.PERCEPTRON, "hidden", ((8,),))
    monkeypatch.setitem(baselines.PERCEPTRON, "epochs", 40)
    folder, digest, *_ = breast
    row = Baseline(table="breast", digest=digest, fold=1, model=model).run(folder, "cpu")
    assert row["accuracy"] > 0.85
    assert row["auroc"] > 0.95


# Looking up


@pytest.mark.parametrize("variant", VARIANTS)
def test_tables_are_doubled_and_changed(variant):
    random, raised = VARIANTS[variant]
    rows, truth = doubled(variant, 3, torch.Generator().manual_seed(0))
    shown, asked = rows.values[:, :16], rows.values[:, 16:]
    assert torch.equal(shown[..., :3], asked[..., :3])
    assert torch.equal(shown[..., 3:6], asked[..., 3:6]) == (not random)
    assert (shown[..., -1] - truth).allclose(torch.tensor(float(raised)), atol=1e-5)
    assert rows.hidden.sum().item() == 3 * 16
    found = scored(nearest(rows), truth)
    assert found["rmse"] == pytest.approx(float(raised), abs=1e-6) if not random else found["rmse"] > 0.5


def test_the_nearest_row_is_found():
    values = torch.tensor([[[0.0, 0.0, 5.0], [3.0, 0.0, 7.0], [2.0, 0.0, 0.0], [1.0, 1.0, 0.0]]])
    rows = Rows(values, torch.zeros(1, 4, 3).long(), torch.zeros(1, 4, 3).bool())
    assert nearest(rows).tolist() == [[7.0, 5.0]]


def test_a_look_up_is_scored_on_tables_never_seen(tmp_path):
    row = LookUp(variant="plain", steps=4).run(tmp_path, "cpu")
    assert -1 <= row["r"] <= 1
    assert row["nearest"]["rmse"] == pytest.approx(0, abs=1e-6)
    assert LookUp(variant="plain", steps=4).name != LookUp(variant="plain", steps=4, rows="none").name
    with pytest.raises(ValueError, match="variant"):
        LookUp(variant="some")
