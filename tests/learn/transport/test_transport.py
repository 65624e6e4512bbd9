"""What kq.transport says of paths whose answer is known."""

import dataclasses
from io import StringIO

import numpy as np
import pytest
import torch
from rich.console import Console

import keyquery as kq
from keyquery.learn.transport.transport import CURVES
from keyquery.pages import terminal
from keyquery.pages.document import page
from keyquery.reading import digest

LENGTHS = ("distance", "wasserstein", "path_length", "bures")


def cloud(n=30, d=3, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


def walk(steps=4, n=30, d=3, seed=0):
    """A path of random steps."""
    return np.random.default_rng(seed).normal(size=(steps + 1, n, d)).cumsum(0)


@pytest.mark.parametrize("labels", [None, np.arange(30) % 3])
def test_a_translation_is_optimal_and_straight(labels):
    start = cloud()
    reading = kq.transport([start + k * np.array([3.0, 0.0, 4.0]) for k in range(5)], labels)
    for figures in (vars(reading), *reading.classes):
        for name in LENGTHS:
            assert figures[name] == pytest.approx(20.0, rel=1e-12)
        assert figures["wasserstein"] == figures["distance"]
        assert figures["optimality"] == figures["matched"] == 1.0
        assert figures["monge_gap"] == 0.0
        assert figures["efficiency"] == pytest.approx(1.0, rel=1e-12)


def test_a_permuted_cloud_has_gone_far_for_nothing():
    start = cloud()
    reading = kq.transport([start, np.roll(start, 1, axis=0)])
    assert reading.wasserstein == reading.optimality == reading.matched == 0.0
    assert reading.monge_gap == reading.distance > 1
    assert reading.bures < 1e-12
    assert reading.efficiency == pytest.approx(1.0)  # each point went straight, only to the wrong place


def test_a_way_there_and_back_again():
    start = cloud()
    reading = kq.transport([start, start + 1, start])
    assert reading.distance == reading.efficiency == reading.wasserstein == 0.0
    assert reading.optimality is None
    assert reading.path_length == pytest.approx(2 * 3**0.5)
    still = kq.transport([start, start])
    assert (still.path_length, still.efficiency, still.optimality) == (0.0, None, None)


def test_figures_are_their_definitions():
    path = walk()
    reading = kq.transport(path)
    moved = np.linalg.norm(path[-1] - path[0], axis=1)
    length = np.linalg.norm(np.diff(path, axis=0), axis=2).sum(0)
    assert reading.distance == pytest.approx(np.sqrt((moved**2).mean()), rel=1e-12)
    assert reading.path_length == pytest.approx(length.mean(), rel=1e-12)
    assert reading.efficiency == pytest.approx(moved.mean() / length.mean(), rel=1e-12)
    assert reading.monge_gap == reading.distance - reading.wasserstein
    assert reading.optimality == reading.wasserstein / reading.distance
    assert reading.provenance["tensors"] == {"start": digest(path[0]), "end": digest(path[-1])}
    pairs = ((path[0][:, None] - path[-1]) ** 2).sum(-1)
    assert reading.random == pytest.approx(np.sqrt(pairs.mean()), rel=1e-12)


def test_squares_of_the_whole_are_means_of_the_classes_over_points():
    path, labels = walk(), np.repeat(["a", "b", "c"], [4, 6, 20])
    reading = kq.transport(path, labels)
    assert [row["class"] for row in reading.classes] == ["a", "b", "c"]
    sizes = np.array([row["points"] for row in reading.classes])
    assert sizes.tolist() == [4, 6, 20]
    for name, power in (("distance", 2), ("wasserstein", 2), ("bures", 2), ("random", 2), ("matched", 1)):
        values = np.array([row[name] for row in reading.classes]) ** power
        assert getattr(reading, name) ** power == pytest.approx((sizes * values).sum() / 30, rel=1e-12)
    for row, at in zip(reading.classes, (slice(0, 4), slice(4, 10), slice(10, 30)), strict=True):
        alone = kq.transport(path[:, at])
        assert {name: row[name] for name in CURVES} == {name: getattr(alone, name) for name in CURVES}
    assert reading.wasserstein > kq.transport(path).wasserstein  # across classes there is a cheaper coupling


def test_the_released_numbers():
    points = np.random.default_rng(0).normal(size=(2 * 45 * 20, 2))  # two classes of 45 instances at 20 steps
    labels = np.repeat([0, 1], 45 * 20)
    shifted = np.where(labels[:, None] == 0, 1.0, -2.0)
    path = np.stack([points + k * shifted for k in range(11)])
    reading = kq.transport(path, labels, published=True, frames=2)
    for row in reading.classes:
        assert row["efficiency"] == pytest.approx(1 / 30, rel=1e-12)  # a straight path, and optimal
        assert row["optimality"] == 1
    one, two = 10 * 2**0.5 * np.array([1, 2])
    assert reading.efficiency == pytest.approx(0.0333, abs=5e-5)
    assert reading.distance == pytest.approx(30 * (one + two)) == reading.wasserstein  # roots of sums, summed
    assert reading.path_length == pytest.approx(900 * (one + two))
    assert reading.bures == pytest.approx(one**2 + two**2)
    assert kq.transport(path, labels, frames=0).efficiency == pytest.approx(1)


def test_curves_end_at_the_reading_and_are_readings_of_the_way_so_far():
    path, labels = walk(steps=8), np.arange(30) % 2
    reading = kq.transport(path, labels)
    assert reading.steps == list(range(9))
    for at in (3, 8):
        so_far = kq.transport(path[: at + 1], labels, frames=0)
        for name in CURVES:
            assert reading.curves[name][at] == pytest.approx(getattr(so_far, name), rel=1e-12)
    assert [values[0] for values in reading.curves.values()] == [0.0, 0.0, None, 0.0, None]
    assert kq.transport(path, frames=3).steps == [0, 4, 8]
    bare = kq.transport(path, frames=0)
    assert (bare.steps, bare.sketch) == ([], None)


@pytest.mark.parametrize("make", [torch.from_numpy, np.asarray, list, lambda p: torch.from_numpy(p).float()])
def test_paths_of_any_kind(make, tmp_path):
    path = walk()
    assert kq.transport(make(path)).distance == pytest.approx(kq.transport(path).distance, rel=1e-6)
    np.save(tmp_path / "path.npy", path.astype(np.float16))
    mapped = kq.transport(np.load(tmp_path / "path.npy", mmap_mode="r"))
    assert mapped.distance == pytest.approx(kq.transport(path).distance, rel=1e-2)


def test_a_sketch_keeps_distances_of_a_flat_path():
    path = walk(n=20, d=2)
    drawn = kq.transport(path, np.arange(20) % 2).sketch
    frames = np.array(drawn["frames"]).reshape(5, 20, 2)
    variances = np.linalg.svd((path - path.mean((0, 1))).reshape(-1, 2), compute_uv=False) ** 2
    assert drawn["shares"] == pytest.approx(variances / variances.sum(), abs=1e-3)
    assert drawn["classes"] == [0, 1] * 10
    steps, drawn_steps = (np.linalg.norm(np.diff(p, axis=0), axis=2) for p in (path, frames))
    np.testing.assert_allclose(drawn_steps, steps, atol=5e-3)
    targets = np.array(drawn["targets"]).reshape(20, 2)
    assert {tuple(t) for t in targets.round(2)} == {tuple(t) for t in frames[-1].round(2)}
    assert len(kq.transport(path, points=7).sketch["classes"]) == 7
    one = kq.transport(walk(d=1)).sketch
    assert one["frames"][0][1::2] == [0.0] * 30


def test_it_has_lines_and_a_picture():
    reading, text = kq.transport(walk(), np.repeat([0, 1], 15), name="pets"), StringIO()
    for shown in (reading, kq.transport(walk(n=62), np.arange(62) // 2, frames=0)):
        terminal.show(shown, Console(file=text, width=100))
    words = ("pets", "optimality", f"{reading.distance:.3g}", "\n29 ", "The first 30 of 31 classes")
    assert all(word in text.getvalue() for word in words)
    assert "\n30 " not in text.getvalue()
    assert list(reading.to_frame()["class"]) == ["all", 0, 1]
    axes = reading.plot().axes
    assert [axis.get_xlabel() for axis in axes][1:] == ["step", "step"]
    with pytest.raises(ValueError, match="a path without frames has no figure"):
        kq.transport(walk(), frames=0).plot()
    with pytest.raises(ValueError, match="a path without frames has no page"):
        page(dataclasses.replace(reading, steps=[], sketch=None))


SHAPE = r"path must be \(steps \+ 1, points, dims\), with a start and an end, got "


@pytest.mark.parametrize(
    ("path", "labels", "said"),
    [
        (np.zeros((1, 4, 2)), None, SHAPE + r"\(1, 4, 2\)"),
        (np.zeros((3, 4)), None, SHAPE + r"\(3, 4\)"),
        (np.zeros((3, 0, 4)), None, SHAPE + r"\(3, 0, 4\)"),
        ([np.zeros((4, 2)), np.zeros((3, 2))], None, r"at every step: step 0 has shape \(4, 2\), step 1 \(3, 2\)"),
        (np.array([[[0.0]], [[1.0]], [[np.nan]]]), None, "path must be finite: at step 2, 1 of 1 points are not"),
        (np.zeros((2, 4, 2)), [0, 1], "labels must have one class per point, 4, got 2"),
        (np.zeros((2, 2, 2)), [0.0, np.nan], "labels must have a value in every row, got None, NaN or infinity"),
        ("path.npy", None, "path must be an array .* or a list, got str"),
    ],
)
@pytest.mark.unchecked
def test_bad_paths_are_told(path, labels, said):
    with pytest.raises((TypeError, ValueError), match=said):
        kq.transport(path, labels)
