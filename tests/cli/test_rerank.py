"""`keyquery rerank`: vectors in files to lists in files, and what it says of what does not fit."""

import json
import re

import numpy as np
import pytest

import keyquery as kq
from tests.learn.rerank.groups import curves
from tests.pages.readings import block_of, data_of
from tests.processes import refusal, run

NETWORK = ["--anchors", "8", "--width", "8", "--steps", "2"]


@pytest.fixture
def files(tmp_path):
    vectors, labels = curves(6, seed=0)
    arrays = {"queries": vectors[:3], "database": vectors[3:], "features": vectors, "labels": labels}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array.numpy())
    return tmp_path


def rerank(folder, *options, end=run):
    return end("rerank", folder / "queries.npy", folder / "database.npy", *options)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("affinity", kq.AffinityReranker(anchors=8, device="cpu")),
        ("expansion", kq.AlphaQueryExpansion(device="cpu")),
        ("reciprocal", kq.KReciprocalReranker(device="cpu")),
        ("diffusion", kq.DiffusionReranker(device="cpu")),
    ],
)
def test_lists_of_methods_are_written(files, name, model):
    options = ["--method", name, "--top", 40, "--out", files / "a.npy", "--scores", files / "s.npy", "--most", 4]
    said = rerank(files, *options, *(["--anchors", 8] if name == "affinity" else []))
    queries, database = (np.load(files / f"{part}.npy") for part in ("queries", "database"))
    order, scores = model.rerank(queries, database, top=40)
    assert np.array_equal(np.load(files / "a.npy"), order)
    assert np.array_equal(np.load(files / "s.npy"), scores)
    assert said.count("rank  was  moved") == 3
    assert f"Written: {files / 'a.npy'}" in said.replace("\n", "")


def test_a_reranker_is_learned_saved_and_used_again(files):
    learn = ["--fit", files / "features.npy", "--labels", files / "labels.npy", "--save", files / "m.safetensors"]
    rerank(files, *learn, *NETWORK, "--top", 30, "--out", files / "a.json", "-q")
    rerank(files, "--model", files / "m.safetensors", "--top", 30, "--out", files / "b.json", "-q")
    lists = [json.loads((files / name).read_text()) for name in ("a.json", "b.json")]
    assert lists[0] == lists[1]
    assert np.shape(lists[0]) == (3, 30)
    rerank(files, "--method", "reciprocal", "--out", files / "a.npy", "-q")  # as many as there are
    assert np.load(files / "a.npy").shape == (3, 141)
    model = kq.Reranker.load(files / "m.safetensors", device="cpu")
    assert (model.anchors, model.width, model.steps, model.random_state) == (8, 8, 2, 0)


def test_a_first_round_of_ones_own_and_images(files):
    lists = np.stack([np.random.default_rng(place).permutation(141)[:50] for place in range(3)])
    np.save(files / "lists.npy", lists)
    images = np.zeros((141, 4, 4), np.uint8)
    np.savez(files / "images.npz", images=images)
    options = ["--lists", files / "lists.npy", "--method", "expansion", "--out", files / "a.npy", "--top", 20]
    shown = ["--images", files / "images.npz", "--html", files / "a.html", "--json", files / "a.json"]
    rerank(files, *options, *shown, "--csv", files / "a.csv", "--picture", files / "a.svg", "-q")
    found = np.load(files / "a.npy")
    assert np.array_equal(found[:, 20:], lists[:, 20:])
    assert np.array_equal(np.sort(found[:, :20]), np.sort(lists[:, :20]))
    reading = kq.Reading.load(files / "a.json")
    shown = {str(item) for query in reading.queries for item in (*query["before"], *query["after"])}
    assert set(block_of(data_of((files / "a.html").read_text()), "ranking")["pictures"]) == shown
    assert reading.queries[1]["after"] == found[1, :10].tolist()
    assert (files / "a.csv").read_text().startswith("query,query_name,item")


def test_what_does_not_fit_is_told_and_nothing_is_written(files):
    before = sorted(files.iterdir())
    out = ["--out", files / "a.npy", "-q"]
    np.savez(files / "two.npz", a=np.ones(2), b=np.ones(2))
    np.save(files / "number.npy", 3)
    (files / "text.npy").write_text("no array")
    cases = [
        ([], "give one of --model FILE, --method NAME, or --fit FEATURES with --labels LABELS"),
        (["--method", "affinity", "--model", "a"], "give one of --model FILE"),
        (["--method", "afinity"], "--method must be one of .* did you mean 'affinity'"),
        (["--fit", files / "features.npy"], "--fit and --labels go together"),
        (["--method", "affinity", "--save", files / "m"], "--save requires --fit"),
        (["--method", "reciprocal", "--anchors", 8], "--anchors requires --fit or --method affinity"),
        (["--method", "affinity", "--anchors", 8, "--steps", 400], "--steps requires --fit"),
        (
            ["--method", "affinity", "--anchors", 512],
            "anchors is 512, but lists have 141 candidates: use at most 142 anchors",
        ),
        (["--method", "expansion", "--lists", files / "none.npy"], "--lists: file not found"),
        (["--method", "expansion", "--lists", files / "two.npz"], "--lists: .*two.npz is not a readable .npy file"),
        (["--method", "expansion", "--lists", files / "number.npy"], "lists must be an array, got a single value"),
        (["--method", "expansion", "--lists", files / "text.npy"], r"text\.npy is not a readable \.npy file"),
        (
            ["--method", "expansion", "--scores", files / "s.txt"],
            "the extension of --scores must be one of .* got '.txt'",
        ),
        (["--model", files / "queries.npy"], "is not a complete estimator file"),
        (
            ["--fit", files / "labels.npy", "--labels", files / "labels.npy", *NETWORK],
            r"features must be vectors \(n, dim\)",
        ),
    ]
    for options, said in cases:
        assert re.search(said, rerank(files, *options, *out, end=refusal))
    for name in ("two.npz", "number.npy", "text.npy"):
        (files / name).unlink()
    assert sorted(files.iterdir()) == before


def test_nothing_is_learned_that_could_not_be_used(files, monkeypatch):
    monkeypatch.setattr(kq.Reranker, "fit", None)  # would fail in another way if it were called
    learn = ["--fit", files / "features.npy", "--labels", files / "labels.npy", "-q"]
    assert "anchors is 50, but lists have 9 candidates" in rerank(
        files, *learn, "--anchors", 50, "--top", 9, end=refusal
    )
    np.save(files / "queries.npy", np.ones((2, 5)))
    assert "vectors of one width, got 5 and 24" in rerank(files, *learn, *NETWORK, end=refusal)
