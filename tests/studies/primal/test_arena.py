"""The arena: generators checked by oracles of another make, and trainings that stop, go on and learn."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from keyquery_studies.common.runner import run_jobs
from keyquery_studies.primal.arena import listops as lists
from keyquery_studies.primal.arena import pathfinder as paths
from keyquery_studies.primal.arena.model import EAGER, Classifier
from keyquery_studies.primal.arena.speed import TIMED, Speed
from keyquery_studies.primal.arena.tasks import SPLITS, TASKS, load_arena, prepare_arena
from keyquery_studies.primal.arena.training import ArenaTraining, _order
from keyquery_studies.primal.released_code import published_regularizer, start_as_published

pytestmark = pytest.mark.slow  # it trains

WORDS = ["", *map(str, range(10)), "min(", "max(", "median(", "total(", ")"]


def said(row):
    """A token sequence as a Python expression: calls in the place of lists."""
    text = ",".join(WORDS[token] for token in row if token)
    return text.replace("(,", "(").replace(",)", ")")


def median(*values):
    return int(np.median(values))


def total(*values):
    return sum(values) % 10


def test_every_list_evaluates_to_its_label():
    tokens, labels = lists.listops(150, seed=3)
    for row, label in zip(tokens, labels, strict=True):
        assert eval(said(row), {"median": median, "total": total, "min": min, "max": max}) == label


def test_lists_follow_the_recipe():
    tokens, labels = lists.listops(400, seed=4)
    lengths = (tokens > 0).sum(1)
    assert (lengths.min() > 500, lengths.max() < 2000, tokens.shape[1]) == (True, True, 2000)
    assert all((row[:length] > 0).all() for row, length in zip(tokens, lengths, strict=True))  # padding is at the end
    assert set(labels) == set(range(10))
    arities, depths = [], []
    for row in tokens:
        open_, depth = [0], 0
        for token in row[row > 0]:
            if token == lists.CLOSE:
                arities.append(open_.pop())
            else:
                open_[-1] += 1
                if token >= lists.OPEN:
                    open_.append(0)
                    depth = max(depth, len(open_) - 1)
        depths.append(depth)
    counts = np.bincount(arities)
    assert (min(arities), max(arities), max(depths)) == (2, 10, 9)  # ten levels, the last of digits alone
    assert counts[2:].std() / counts[2:].mean() < 0.1
    kinds = np.bincount(tokens.ravel(), minlength=16)
    assert kinds[11:15].std() / kinds[11:15].mean() < 0.02
    assert kinds[1:11].std() / kinds[1:11].mean() < 0.02


def reached(cells, start, end):
    """A flood fill over cells that touch, corners too."""
    seen, queue = {start}, deque([start])
    while queue:
        y, x = queue.popleft()
        for near in ((y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)):
            if near not in seen and min(near) >= 0 and max(near) < len(cells) and cells[near]:
                seen.add(near)
                queue.append(near)
    return end in seen


@pytest.fixture(scope="module")
def drawing():
    return paths.draw(np.random.default_rng(5))


def test_a_flood_fill_of_the_paths_gives_the_label(drawing):
    assert len(drawing.labels) > 50
    assert 0.3 < drawing.labels.mean() < 0.7
    for image, label in enumerate(drawing.labels):
        start, end = (tuple(int(place) for place in mark * paths.FINE) for mark in drawing.marks[image])
        assert reached(drawing.filled(image), start, end) == bool(label)


def test_marks_and_dashes_are_where_the_paths_are(drawing):
    whole = paths.SIZE
    for image, pixels in enumerate(drawing.images):
        assert all(pixels[tuple(mark.astype(int))] == 255 for mark in drawing.marks[image])
        filled = drawing.filled(image).reshape(whole, paths.FINE, whole, paths.FINE).any((1, 3))
        near = np.zeros_like(filled)
        for dy in (-2, -1, 0, 1, 2):
            for dx in (-2, -1, 0, 1, 2):
                near |= np.roll(filled, (dy, dx), (0, 1))
        assert not pixels[~near].any()  # nothing is drawn elsewhere
        assert (pixels[filled] > 60).mean() > 0.8  # but for gaps the paths are seen
    lengths = [np.linalg.norm(np.diff(path, axis=1), axis=-1) for path in drawing.paths]
    assert [length.shape[1] for length in lengths] == [14, 14, 4, 4, 4, 4, 4]
    assert all(np.allclose(length[~np.isnan(length)], 3.0) for length in lengths)
    starts = np.linalg.norm(drawing.paths[0][:, 0] - drawing.paths[1][:, 0], axis=1)
    assert np.allclose(starts, 7.0)


def test_the_distance_of_the_marks_hardly_tells_the_label(drawing):
    rng = np.random.default_rng(6)
    some = [drawing, *(paths.draw(rng) for _ in range(5))]
    marks, labels = (np.concatenate([getattr(one, name) for one in some]) for name in ("marks", "labels"))
    away = np.linalg.norm(marks[:, 0] - marks[:, 1], axis=1)
    best = max(max(right := ((away > far) == labels).mean(), 1 - right) for far in np.linspace(0, 40, 80))
    assert best < 0.62  # chance and the search for the best give .55


@pytest.mark.slow
@pytest.mark.parametrize("task", ["listops", "pathfinder"])
def test_sequences_do_not_depend_on_who_makes_them(task, tmp_path, monkeypatch):
    monkeypatch.setattr("keyquery_studies.primal.arena.tasks.CHUNK", 20)
    facts = [prepare_arena(task, tmp_path / str(workers), examples=(45, 5, 10), workers=workers) for workers in (1, 2)]
    assert facts[0] == facts[1]
    one, other = (load_arena(task, tmp_path / str(workers)) for workers in (1, 2))
    for split, count in zip(SPLITS, (45, 5, 10), strict=True):
        assert all(np.array_equal(*pair) for pair in zip(one[split], other[split], strict=True))
        assert one[split][0].shape == (count, TASKS[task].length)
    rows = {row.tobytes() for split in SPLITS for row in one[split][0]}
    assert len(rows) == 60  # no example is in two splits
    again = prepare_arena(task, tmp_path / "1", examples=(45, 5, 10))
    assert again == facts[0]
    assert prepare_arena(task, tmp_path / "1", examples=(30, 5, 10))["digest"] != facts[0]["digest"]


def test_texts_become_bytes_in_their_published_split(tmp_path):
    rows = [("train", i % 2, f"film {i} é") for i in range(2600)] + [("test", 1, "x" * 5000), ("test", 0, "no")]
    lines = [f"{split}\t{label}\t9\t0\t{text}" for split, label, text in rows]
    (tmp_path / "films.tsv").write_text("split\tlabel\trating\tid\ttext\n" + "\n".join(lines) + "\n", encoding="utf-8")
    facts = prepare_arena("text", tmp_path, tmp_path / "films.tsv")
    assert (facts["examples"], facts["source"]) == ([100, 2500, 2], "films.tsv")
    found = load_arena("text", tmp_path)
    tokens, labels = found["test"]
    assert bytes(tokens[0]) == b"x" * 4096  # cut
    assert (bytes(tokens[1][:3]), labels.tolist()) == (b"no\0", [1, 0])
    learned = [bytes(row).rstrip(b"\0").decode() for split in SPLITS[:2] for row in found[split][0]]
    assert sorted(learned) == sorted(text for split, _, text in rows if split == "train")
    numbers = [int(text.split()[1]) % 2 for text in learned]
    assert numbers == [*found["train"][1], *found["validation"][1]]
    assert prepare_arena("text", tmp_path) == facts


def test_images_become_grey(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(5010, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(5010) % 10
    np.savez(tmp_path / "few.npz", images=pixels, labels=labels, n_train=np.int64(5005))
    assert prepare_arena("image", tmp_path, tmp_path / "few.npz")["examples"] == [5, 5000, 5]
    tokens, names = load_arena("image", tmp_path)["test"]
    grey = pixels[5005:].astype(float) @ [0.299, 0.587, 0.114]
    assert np.abs(tokens.reshape(-1, 32, 32) - grey).max() <= 0.5001
    assert names.tolist() == labels[5005:].tolist()
    with pytest.raises(
        ValueError, match=r"task 'image' needs an .npz file of images with labels and n_train: .* holds"
    ):
        prepare_arena("image", tmp_path / "none")
    np.savez(tmp_path / "bare.npz", images=pixels[:3])
    with pytest.raises(ValueError, match="must hold labels, and n_train"):
        prepare_arena("image", tmp_path, tmp_path / "bare.npz")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Short sequences in the place of images; their class is the token that they have most of."""
    folder = tmp_path_factory.mktemp("toy")
    rng = np.random.default_rng(0)
    made = {}
    for split, count in zip(SPLITS, (512, 64, 128), strict=True):
        labels = rng.integers(10, size=count).astype(np.uint8)
        tokens = np.where(rng.random((count, 24)) < 0.5, labels[:, None], rng.integers(10, 256, (count, 24)))
        made |= {split: tokens.astype(np.uint8), f"{split}_labels": labels}
    (folder / "arena").mkdir()
    np.savez(folder / "arena" / "image.npz", **made)
    return folder


def job(**changes):
    settings = {"task": "image", "attention": "primal", "seed": 0, "data": "toy", "steps": 20, "batch": 32}
    return ArenaTraining(**{**settings, **changes})


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("primal", "general")]


@pytest.mark.parametrize("attention", ["primal+", *SLOW])
def test_a_training_learns(toy, attention, monkeypatch):
    chosen = job(attention=attention, steps=60)
    recipe = replace(chosen.recipe(), lr=6e-3, check_every=20)
    monkeypatch.setattr(ArenaTraining, "recipe", lambda self: recipe)
    row = chosen.run(toy, "cpu")
    assert row["accuracy"] > 0.8  # chance is .1
    assert (row["steps_run"], row["partial"]) == (60, False)
    assert [step for step, _ in row["curve"]] == [20, 40, 60]
    assert row["validation"] == max(right for _, right in row["curve"])


def without_time(row):
    return {key: value for key, value in row.items() if key not in ("seconds", "ms_a_step", "share")}


def test_a_run_cut_short_goes_on_as_if_it_had_not_been(toy, tmp_path):
    folder = tmp_path
    (folder / "arena").symlink_to(toy / "arena")
    whole = job(seed=3).run(folder, "cpu")
    assert not list((folder / "checkpoints").iterdir())
    first = job(seed=3, share=0.3).run(folder, "cpu")
    assert (first["steps_run"], first["partial"]) == (6, False)
    assert first["curve"] == whole["curve"][:6]
    assert first["share_run"] == 6 / 35_000
    rest = job(seed=3).run(folder, "cpu")
    assert without_time(rest) == without_time(whole)
    assert not list((folder / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_run_out_of_time_is_partial_and_goes_on(toy, tmp_path, monkeypatch):
    (tmp_path / "arena").symlink_to(toy / "arena")
    [row] = run_jobs([job(minutes=0.0)], tmp_path, "cpu")
    assert (row["partial"], row["steps_run"], row["accuracy"]) == (True, 0, None)
    ticks = iter(range(10**6))
    monkeypatch.setattr("keyquery_studies.primal.arena.training.perf_counter", lambda: float(next(ticks)))
    [row] = run_jobs([job(minutes=0.2)], tmp_path, "cpu")  # a clock that goes on by a second whenever it is read
    assert row["partial"]
    assert 0 < row["steps_run"] < 20
    assert row["accuracy"] is not None
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    monkeypatch.undo()
    [done] = run_jobs([job()], tmp_path, "cpu")
    whole = job().run(toy, "cpu")
    assert without_time(done) == without_time(whole)
    [again] = run_jobs([job(minutes=0.0)], tmp_path, "cpu")  # done: nothing is left to break off
    assert again == done


def test_a_shortened_schedule_is_a_whole_one():
    cut, short, whole = job(share=0.2), job(share=0.2, schedule="shortened"), job()
    assert cut.recipe() == whole.recipe()
    assert (cut.end(), short.end(), whole.end()) == (4, 4, 20)
    assert short.recipe().steps == 4
    published = ArenaTraining(task="text", attention="general", seed=0, data="")
    assert (published.recipe().steps, published.recipe().warmup, published.recipe().lr) == (20_000, 8000, 1e-4)
    assert len({one.name for one in (cut, short, whole, job(seed=1), job(start="default"))}) == 5
    assert job(minutes=3.0).name == whole.name


def test_an_epoch_shows_every_example_once():
    order = _order(10, 7, 4, seed=0).flatten().tolist()
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order[:10] != order[10:20]


def test_padding_changes_nothing():
    torch.manual_seed(0)
    for attention in ("primal", "primal+", "general", EAGER):
        model = Classifier(attention, 16, 12, 3, {"rank": 4, "eta": 0.1}).eval()
        tokens = torch.randint(1, 16, (2, 12))
        mask = torch.arange(12) < torch.tensor([[12], [7]])
        other = tokens.where(mask, 0)
        with torch.no_grad():
            assert torch.allclose(model(tokens, mask), model(other, mask), atol=1e-6)
            assert torch.allclose(model(tokens, mask)[1], model(tokens[1:, :7])[0], atol=1e-5)


def test_eager_softmax_is_softmax():
    torch.manual_seed(0)
    fused, eager = (Classifier(attention, 16, 12, 3).eval() for attention in ("general", EAGER))
    state = fused.state_dict()
    for number, block in enumerate(eager.body.blocks):
        for part in ("weight", "bias"):
            name = f"body.blocks.{number}.attention"
            maps = [state.pop(f"{name}.{which}.{part}") for which in ("query", "key", "value")]
            state[f"{name}.maps.{part}"] = torch.cat(maps)
        assert block.attention.maps.in_features == 64
    eager.load_state_dict(state)
    tokens, mask = torch.randint(1, 16, (2, 12)), torch.arange(12) < torch.tensor([[12], [7]])
    for given in (None, mask):
        assert torch.allclose(fused(tokens, given), eager(tokens, given), atol=1e-5)


def test_primal_layers_start_as_small_as_published():
    torch.manual_seed(0)
    model = Classifier("primal", 16, 300, 10, {"rank": 20, "eta": 1.0})
    start_as_published(model)
    for block in model.body.blocks:
        layer = block.attention
        assert torch.allclose(layer.directions.norm(dim=2), torch.tensor(20**-0.5))
        roots = (layer.log_lambda / 2).exp()
        assert 0 < roots.min() < 0.2 < 0.8 < roots.max() < 1
    model(torch.randint(1, 16, (4, 300)))
    assert published_regularizer(model) < 1  # a task's loss is about 2


def test_speed_is_timed_in_one_run(tmp_path, monkeypatch):
    chosen = Speed(task="text", where="here", repeats=2, steps=1, batch=2, length=32)
    row = chosen.run(tmp_path, "cpu")
    assert [one["attention"] for one in row["rows"]] == list(TIMED)
    by = {one["attention"]: one for one in row["rows"]}
    assert by["general"]["faster"] == by[EAGER]["faster_than_eager"] == 1
    assert all(one["ms_low"] <= one["ms"] <= one["ms_high"] for one in row["rows"])
    assert (by["primal"]["published_faster"], by["primal+"]["published_faster"]) == (7.4, None)
    step = Speed._step

    def too_large(self, attention, device):
        if attention == EAGER:
            raise torch.OutOfMemoryError("no room")
        return step(self, attention, device)

    monkeypatch.setattr(Speed, "_step", too_large)
    *_, last = chosen.run(tmp_path, "cpu")["rows"]
    assert last == {"attention": EAGER, "ms": None, "note": "does not fit into memory", "busy_ms": None}


def test_what_cannot_be_trained_is_told():
    with pytest.raises(ValueError, match="task must be one of 'listops', 'text', 'image', 'pathfinder', got 'lists'"):
        job(task="lists")
    with pytest.raises(ValueError, match="attention must be one of 'primal', 'primal\\+', 'general', got 'softmax'"):
        job(attention="softmax")
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, got 0"):
        job(share=0.0)
    with pytest.raises(ValueError, match="minutes must be at least 0, got -1"):
        job(minutes=-1.0)
