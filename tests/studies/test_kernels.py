"""The study of kernels, small: its tasks have the truth they promise, and every training is done once."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import scipy.stats
import torch
from keyquery_studies.common.comparisons import difference, holm
from keyquery_studies.common.language_models import INITS, Tokenizer, Training, begin, first_below, prepare
from keyquery_studies.common.rates import tuned
from keyquery_studies.kernels import synthetic
from keyquery_studies.kernels.arms import ARMS
from keyquery_studies.kernels.command import SIZES
from keyquery_studies.kernels.longer import longer
from keyquery_studies.kernels.study import Kernels, Plan, starts
from keyquery_studies.kernels.study import run as run_kernels
from keyquery_studies.kernels.synthetic import HEAD, SEEN, SHARPNESS, TASKS, TOKENS, WIDTH, Teller, Trial, Truth
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.layers.kernels import KERNELS

pytestmark = pytest.mark.usefixtures("few_windows")
SMALL = {"vocabulary": 300, "width": 16, "depth": 1, "length": 8, "batch": 4, "few": 0.5, "steps": 2, "doubled": 1}
TINY = Plan(seeds=(0,), trial_seeds=(0,), samples=(8,), trial_steps=10, rates=(1e-3, 2e-3), **SMALL)


@pytest.fixture(scope="module")
def study(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return run_kernels(corpus, out, TINY, device="cpu"), out


def known(kernel, truth):
    """A head that is set to the truth by hand: r = 8 has room for both halves of what a skew kernel pairs."""
    head = Teller(kernel)
    seen = truth.directions[:, :SEEN].T.float() * math.sqrt(SHARPNESS / SEEN * math.sqrt(HEAD))
    weight = head.attention.key.weight.data.zero_()
    if kernel == "skew":
        weight[: SEEN // 2, :WIDTH], weight[HEAD // 2 : HEAD // 2 + SEEN // 2, :WIDTH] = seen.chunk(2)
    else:
        weight[:SEEN, :WIDTH] = seen
    return head


@pytest.mark.parametrize(("kernel", "task"), [("psd", 0), ("symmetric", 0), ("rbf", 0), ("skew", 1)])
def test_the_right_kernel_holds_the_truth_exactly(kernel, task):
    truth = Truth(TASKS[task], seed=3)
    data = truth.draw(20, torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(known(kernel, truth)(data.tokens), data.targets, atol=1e-4)


def test_smoothing_is_by_distance():
    truth = Truth("smoothing", seed=1)
    data = truth.draw(3, torch.Generator().manual_seed(0))
    x, labels = data.tokens[1, :, :-1].double().numpy(), data.tokens[1, :, -1].numpy()
    z = x @ truth.directions.numpy()[:, :SEEN]
    for query in range(TOKENS):
        near = [math.exp(-SHARPNESS * np.sum((z[query] - other) ** 2) / 8) for other in z]
        near[query] = 0.0
        assert np.dot(near, labels) / sum(near) == pytest.approx(float(data.targets[1, query]), abs=1e-5)


def test_look_up_tells_the_successor_and_a_symmetric_form_is_wrong_as_often_as_right():
    truth = Truth("look-up", seed=2)
    data = truth.draw(50, torch.Generator().manual_seed(0))
    z = data.tokens[..., :-1].double() @ truth.directions[:, :SEEN]
    quarter = TOKENS // 4
    assert torch.allclose(z[:, quarter : 2 * quarter], z[:, :quarter] @ synthetic.turn().T, atol=1e-5)
    successor = z.roll(-quarter, 1)  # z, Jz, −z and −Jz stand in this order
    predecessor = z.roll(quarter, 1)

    def right(form):
        return ((z @ form * successor).sum(-1) > (z @ form * predecessor).sum(-1)).double().mean()

    true = truth.directions[:, :SEEN].T @ truth.form() @ truth.directions[:, :SEEN]
    assert right(true) == 1
    for _ in range(5):
        any_ = torch.randn(SEEN, SEEN, dtype=torch.float64)
        assert right(any_ + any_.T) == 0.5


def test_both_tasks_have_the_same_inputs():
    one, other = (Truth(task, seed=0).draw(4, torch.Generator().manual_seed(5)) for task in TASKS)
    assert torch.equal(one.tokens, other.tokens)
    assert not torch.allclose(one.targets, other.targets)


def test_noise_is_in_units_of_the_targets():
    clean, noisy = (Truth("look-up", 0).draw(2000, torch.Generator().manual_seed(0), noise) for noise in (0.0, 0.5))
    assert (noisy.targets - clean.targets).std() / clean.targets.std() == pytest.approx(0.5, rel=0.02)


def test_a_head_that_knows_nothing_tells_the_mean_of_the_others():
    tokens = torch.randn(2, TOKENS, WIDTH + 1)
    labels = tokens[1, :, -1]
    assert synthetic.alike(tokens)[1, 3] == pytest.approx(float((labels.sum() - labels[3]) / (TOKENS - 1)), abs=1e-5)


@pytest.mark.slow
def test_skew_learns_to_look_up_and_symmetric_does_not(tmp_path):
    errors = {k: Trial("look-up", k, 128, 0, steps=150).run(tmp_path, "cpu")["error"] for k in ("skew", "symmetric")}
    assert errors["skew"] < 0.3
    assert errors["symmetric"] > 0.95


def test_fresh_heads_spend_half_their_energy_on_direction():
    rows = starts(range(6))
    assert {row["layer"] for row in rows} == {"keyquery", "torch"}
    for (
        row
    ) in rows:  # E[symmetry] = 1/d for iid weights; one head's spread is about 1/d too, and four or more are meant
        assert row["skew"] == pytest.approx((1 - 1 / row["width"]) / 2, abs=1.2 / row["width"])


def test_starts_of_queries_and_keys():
    torch.manual_seed(0)
    model = kq.Encoder(32, depth=2, heads=4)
    before = [block.attention.form().norm2 for block in model.blocks]
    begin(model, "tied")
    for block in model.blocks:
        layer = block.attention
        assert torch.equal(layer.query.weight, layer.key.weight)
        assert torch.equal(layer.query.bias, layer.key.bias)
    torch.manual_seed(0)
    model = kq.Encoder(32, depth=2, heads=4)
    begin(model, "matched")
    for block, was in zip(model.blocks, before, strict=True):
        assert torch.allclose(block.attention.form().norm2, was, rtol=1e-5)
        assert block.attention.form().symmetry.min() > 1 - 1e-9
    begin(model, "small")
    assert model.blocks[1].attention.query.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.blocks[1].attention.form().symmetry.abs().max() < 0.3
    assert not model.blocks[1].attention.key.bias.any()
    with pytest.raises(ValueError, match="init must be one of 'default', 'tied', 'matched', 'small', got 'tide'"):
        begin(model, "tide")


def test_a_speed_up_is_read_off_the_curve():
    curve = [[10, 6.0], [20, 5.0], [30, 5.5], [40, 4.0]]
    assert first_below(curve, 5.25) == pytest.approx(17.5)
    assert first_below(curve, 4.0) == 40
    assert first_below(curve, 7.0) == 10
    assert first_below(curve, 3.9) is None


def trained(training):
    """A row by hand, whose loss is lowest at 4e-3."""
    loss = 3 + abs(training.lr - 4e-3) + training.seed / 100 + (training.kernel == "split") / 10
    return {**vars(training), "loss": loss, "validation": loss, "best_step": 1, "parameters": 9, "curve": []}


def test_the_plan_is_the_promised_one():
    asked = []

    def run(jobs):
        asked.append(jobs)
        return [trained(job) for job in jobs]

    rows = Plan().comparison("digest").rows(run)
    arms, starts, seeds = 2 * 2 * 2 * len(ARMS), 2 * (len(INITS) - 2), 5
    assert [len(jobs) for jobs in asked[:1]] == [(arms + starts) * 4]
    # Then all seeds at the best rate; starts also at two rates beside it, arms on the full text also for longer.
    assert len(asked[1]) == (arms + starts) * seeds + 2 * len(INITS) * 2 * seeds + arms // 2 * 2
    assert len(asked) == 2  # no best rate is at an edge
    assert len(rows) == len({Training(**job).name for job in map(vars, asked[0] + asked[1])})
    assert {row["steps"] for row in rows} == {2500, 5000}
    assert len(Plan().trials()) == 2 * 7 * 7 * 10
    assert Plan(part="language").trials() == []
    assert {row["init"] for row in Plan(part="init").comparison("digest").rows(run)} == set(INITS)


def test_grids_grow_until_their_best_is_inside(monkeypatch):
    monkeypatch.setattr("keyquery_studies.common.rates.EXTENSIONS", 3)
    arm = Training(objective="masked", kernel="psd", seed=0, steps=1, text="", vocabulary=300)
    tried = []

    def run(jobs):
        tried.append(sorted(job.lr for job in jobs))
        return [{"validation": None if job.lr > 0.03 else abs(job.lr - 0.02)} for job in jobs]

    assert [each.lr for each in tuned([arm], (4e-3, 8e-3), run)] == [0.016]
    assert tried == [[4e-3, 8e-3], [4e-3, 8e-3, 0.016], [4e-3, 8e-3, 0.016, 0.032]]  # 0.032 diverged


@pytest.mark.slow
def test_everything_planned_is_measured(study):
    reading, _ = study
    assert len(reading.synthetic) == 2 * len(KERNELS)
    summary = reading.summary()
    assert sum(row["part"] == "language" for row in summary) == 2 * 2 * 2 * len(ARMS)
    assert sum(row["part"] == "init" for row in summary) == 2 * len(INITS)
    assert all(row["loss"] < 6.2 for row in reading.language)  # a uniform guess is 5.7
    few, full = ({r["tokens"] for r in reading.language if r["share"] == share} for share in (0.5, 1.0))
    assert max(few) == pytest.approx(max(full) / 2, abs=1)
    assert [step for step, _ in reading.language[0]["curve"]] == [1, 2]


def made(arm, seed, loss, **changes):
    """A language row by hand."""
    kernel, init = ARMS[arm]
    usual = {"objective": "masked", "share": 1.0, "steps": 40, "rope": False, "lr": 0.002, "parameters": 10}
    facts = {"kernel": kernel, "init": init, "seed": seed, "loss": loss, "validation": loss, "best_step": 40}
    return {**usual, **facts, **changes}


def test_gaps_are_paired_by_seed_at_the_best_rate_of_each_arm():
    rows = [
        *(made("unconstrained", seed, 4.0 + seed / 10) for seed in range(3)),
        *(made("symmetric init", seed, 3.9 + seed / 10) for seed in range(3)),
        *(made("split", seed, loss, lr=0.004) for seed, loss in enumerate((3.5, 3.8, 3.9))),
        made("split", 0, 3.7, lr=0.008),  # another rate, worse
        made("unconstrained", 0, 3.0, steps=80),
        made("split", 0, 3.2, steps=80, lr=0.004),
        made("split", 0, 2.0, lr=0.004, rope=True),  # without a control
    ]
    table = Kernels(starts=[], synthetic=[], language=rows, provenance={"plan": {"part": "language"}}).summary()
    plain, control, split, lonely = table
    assert (plain["gap"], plain["gap_init"]) == (None, None)
    assert control["gap"] == pytest.approx(-0.1)
    assert split["gap"] == pytest.approx(-0.366667, abs=1e-6)
    deviation = np.std([-0.5, -0.3, -0.3], ddof=1)
    assert split["gap_high"] - split["gap"] == pytest.approx(4.302653 * deviation / 3**0.5, rel=1e-5)  # t of 2 degrees
    assert split["gap_init"] == pytest.approx(-0.266667, abs=1e-6)
    assert (split["lr"], split["edge"], plain["edge"]) == (0.004, True, True)
    assert split["longer"] == pytest.approx(0.2)
    assert split["longer_change"] == pytest.approx(3.2 - 3.5)
    assert (lonely["rope"], lonely["gap"]) == (True, None)
    assert split["seeds"] == 3


def test_longer_trainings_are_compared_at_the_rate_that_is_best_over_seeds():
    """Known effects of each arm; the best rate of the symmetric arm is another; one seed alone would mislead."""
    effects = {"unconstrained": 0.0, "symmetric init": -0.02, "symmetric": 0.1, "split": 0.05}
    rows = []
    for (arm, effect), lr, seed, steps in product(effects.items(), (1e-3, 2e-3, 4e-3), range(5), (100, 200)):
        kernel, init = ARMS[arm]
        best = 4e-3 if arm == "symmetric" else 2e-3
        noise = 1e-5 * steps * (seed - 2) * (1 + effect) - (0.3 if seed == 0 and lr == 1e-3 else 0.0)
        loss = 3 + effect + noise + (lr != best) * 0.2 + (steps == 100) * 0.5
        own = {
            "objective": "masked",
            "rope": True,
            "share": 1.0,
            "kernel": kernel,
            "init": init,
            "lr": lr,
            "seed": seed,
        }
        rows.append({**own, "steps": steps, "loss": loss, "validation": loss, "best_step": steps, "parameters": 7})
    table = {row["arm"]: row for row in longer(rows)}
    assert {arm: (row["lr"], row["edge"]) for arm, row in table.items()} == {
        arm: (4e-3, True) if arm == "symmetric" else (2e-3, False) for arm in effects
    }
    for arm, effect in effects.items():
        assert table[arm]["fell"] == pytest.approx(0.5)
        assert table[arm]["loss"] == pytest.approx(3 + effect)
        if arm != "unconstrained":
            assert table[arm]["gap"] == table[arm]["gap_half"] == pytest.approx(effect)
    pairs = [(table[arm]["gap_p"], table[arm]["gap_init_p"]) for arm in ("symmetric", "split")]
    assert all(p is not None and p < 0.01 for pair in pairs for p in pair)


@pytest.mark.slow
def test_longer_trainings_are_done_once(corpus, tmp_path):
    plan = replace(TINY, part="longer", seeds=(0, 1), steps=4, objectives=("masked",), positions=("RoPE",))
    reading = run_kernels(corpus, tmp_path, plan, device="cpu")
    assert len(reading.longer) == 4 * 2 * 2 * 2  # arms, rates, seeds, numbers of steps
    assert {(row["kernel"], row["init"]) for row in reading.longer} == set(ARMS.values())
    assert {row["arm"] for row in reading.summary() if row["part"] == "longer"} == set(ARMS)
    assert run_kernels(corpus, tmp_path, plan, device="cpu").longer == reading.longer
    half = run_kernels(corpus, tmp_path, replace(plan, shares=(0.5,)), device="cpu", workers=2).longer
    assert half[0]["tokens"] == pytest.approx(reading.longer[0]["tokens"] / 2, abs=1)
    both = Kernels.joined(reading, reading)
    assert len(both.longer) == 2 * len(reading.longer)


def test_p_values_are_those_of_scipy_and_statsmodels():
    before = [{"seed": seed, "loss": value} for seed, value in enumerate((1.0, 1.5, 0.7, 1.1))]
    after = [{"seed": seed, "loss": value} for seed, value in enumerate((1.3, 1.6, 1.2, 1.1))]
    t = 0.225 / (np.std([0.3, 0.1, 0.5, 0.0], ddof=1) / 2)
    assert difference(after, before, "loss")["p"] == pytest.approx(2 * (1 - scipy.stats.t.cdf(t, 3)))
    assert difference(after[:1], before, "loss")["p"] is None
    assert difference([{"seed": 0, "loss": None}], before, "loss")["change"] is None
    # By hand: 3·.01, then the largest of that and 2·.03, then 1·.04, kept monotonic.
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])


def test_tokens_are_kept_and_never_mixed(corpus, tmp_path):
    facts = prepare(corpus, tmp_path, 300)
    ids = np.load(tmp_path / "tokens.npy")
    assert (ids.dtype, len(ids), ids.max() < 300) == (np.uint16, facts["tokens"], True)
    assert prepare(None, tmp_path, 300) == prepare(corpus, tmp_path, 300) == facts
    other = tmp_path / "other.tsv"
    other.write_text("label\ttext\n" + "".join(f"{i}\treview {i} is fine\n" for i in range(50)))
    with pytest.raises(
        FileExistsError, match=r"holds tokens of tale.txt, made with other settings; --force replaces them"
    ):
        prepare(other, tmp_path, 300)
    with pytest.raises(ValueError, match=r"vocabulary must be 300, as of the tokens in .*, got 280"):
        prepare(None, tmp_path, 280)
    assert prepare(other, tmp_path, 280, force=True)["corpus"] == "other.tsv"


def test_rows_of_a_table_are_shuffled_whole(tmp_path):
    rows = [f"review {i} is fine" for i in range(50)]
    (tmp_path / "a.tsv").write_text("label\ttext\n" + "".join(f"0\t{row}\n" for row in rows))
    prepare(tmp_path / "a.tsv", tmp_path, 300)
    tokenizer = Tokenizer.load(tmp_path)
    said = tokenizer.decode(np.load(tmp_path / "tokens.npy").tolist()).splitlines()
    assert said != rows
    assert sorted(said) == sorted(rows)


ONE = {"objective": "masked", "kernel": "psd", "seed": 0, "steps": 1, "text": "", "vocabulary": 300}
WRONG = {
    r"corpus must be a text file: .* has no tokens of an earlier run": lambda out: run_kernels(None, out, TINY),
    "corpus must be a text file for part 'all'; only 'synthetic'": lambda out: run_kernels(None, None, TINY),
    "too few for windows of 9": lambda out: run_kernels(out / "short.txt", None, TINY, "cpu"),
    r"part must be one of 'synthetic', .*'all', got 'word'": lambda out: Plan(part="word"),
    "share must be a share above 0 and at most 1, got 0": lambda out: Plan(shares=(1.0, 0.0)),
    "few must be a share above 0 and at most 1, got 2": lambda out: Plan(few=2.0),
    "share must be above 0 and at most 1, got 0": lambda out: Training(**ONE, share=0.0),
    "init 'tied' needs separate queries and keys, not kernel 'psd'": lambda out: Training(**ONE, init="tied"),
    "samples must be at least 2, got 1": lambda out: Trial("look-up", "psd", 1, 0),
    "it needs another part": lambda out: Kernels(starts=starts([0]), synthetic=[], language=[]).plot(),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_trained_or_drawn_is_told(words, tmp_path):
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(ValueError, match=words):
        WRONG[words](tmp_path)


def test_sizes_of_the_command_are_those_of_the_plan():
    assert {name: usual for name, (usual, _) in SIZES.items()} == Plan().sizes()
    plans = [part["plan"] for part in kq.Reading.load("docs/studies/kernels.json").provenance["longer"]]
    longer = {name: value for name, (_, value) in SIZES.items() if name != "steps"}
    assert all({name: plan[name] for name in longer} == longer for plan in plans)


def test_the_command_runs(corpus, tmp_path):
    sizes = "--width 16 --depth 1 --length 8 --vocabulary 300 --batch 4 --few 0.5"
    sizes += " --steps 2 --rate 0.001 --rate 0.002 --seed 4 --device cpu"
    arguments = ["study", "kernels", "--part", "init", "--corpus", str(corpus), *sizes.split()]
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv"), "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, [*arguments, *files], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    reading = kq.Reading.load(tmp_path / "a.json")
    assert {row["seed"] for row in reading.language} == {4}
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + len(reading.language)
    for option, words in (  # before any work
        (("--share", "0.5"), "--objective, --positions and --share are of the part longer, not of init"),
        (("--picture", str(tmp_path / "a.svg")), "--picture shows the parts synthetic, language and longer, not init"),
    ):
        assert words in str(CliRunner().invoke(cli.app, [*arguments, *option]).exception)
