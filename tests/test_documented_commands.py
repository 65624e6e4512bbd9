"""Every command of the README and of docs/ is run on small things of the names that it says.

Those that take hours, wheels or a network are understood here, and run elsewhere.
"""

import re
import shlex
import subprocess
import tomllib
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import keyquery as kq
from keyquery import cli
from keyquery.cli.commands import MODULES, load
from tests import vision

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Understood, and not run: what takes hours, or needs a network, a real model, another file format or certificates.
ELSEWHERE = ("study", "org/name", "model.gguf", "smollm2.gguf", "--adapter DIR", "tls://", "keyquery prove")
SMALLER = ["--top", "40", "--anchors", "16", "--width", "8", "--steps", "2"]  # than the network that is learned
SCHEDULER = "tcp://127.0.0.1:8786"


def commands(page: Path) -> list[str]:
    """Lines of blocks, indented or fenced, that begin with keyquery; blocks of examples in Python are none."""
    found, fenced = [], False
    lines = page.read_text().replace("\\\n", " ").splitlines()
    for block, group in groupby(lines, key=lambda line: bool(line.strip())):
        rows = list(group)
        example = any(row.lstrip().startswith((">>> ", "... ")) for row in rows)
        for row in rows if block else ():
            fenced ^= row.startswith("```")
            if not example and (row.startswith("    ") or fenced) and row.split()[0] == "keyquery":
                found.append(" ".join(shlex.split(row, comments=True, posix=False)))
    return found


ALL = {page.relative_to(ROOT).as_posix(): commands(page) for page in PAGES}
ATLAS = "docs/atlas.md"  # needs wheels of some hundred megabytes; tests/test_atlas.py reads what came of it
KNOWN = ALL.pop(ATLAS)
READ = [*KNOWN, *(one for found in ALL.values() for one in found if any(word in one for word in ELSEWHERE))]
RUN = {page: [one for one in found if one not in READ] for page, found in ALL.items()}
# The README is tested at every change, all other pages by `make test-all`.
BY_PAGE = [pytest.param(p, marks=[] if p == "README.md" else pytest.mark.slow) for p, found in RUN.items() if found]


def test_commands_are_found():
    assert sum(map(len, RUN.values())) > 45
    assert len(READ) > 30


LINKS = {
    kq.models.ENCODER: "path/to/one A models/A OTHER",
    kq.models.DECODER: "path/to/other path/to/model B MODEL BASE models/B models/MODEL "
    "runs/first/checkpoint-500 runs/first/checkpoint-1000",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with everything that commands speak of."""
    folder, text = tmp_path_factory.mktemp("place"), kq.models.LONG_TEXT.read_text()[:6000]
    for model, names in LINKS.items():
        for name in names.split():
            _link(folder / name, model)
    (folder / "models.txt").write_text("models/A  # an encoder\nmodels/B\n")
    (folder / "FILE").write_text(kq.models.LONG_TEXT.read_text()[:20_000])  # windows enough for means by position
    for name in ("reviews.txt", "novels.txt"):
        (folder / name).write_text(text)
    (folder / "paragraph.txt").write_text(text[:300])
    (folder / "prompts.txt").write_text("\n".join(" ".join(map(str, range(300 + i, 308 + i))) for i in range(32)))
    look = kq.look(kq.models.ENCODER, text=folder / "paragraph.txt").to_json()
    for name in ("step1", "step2"):
        (folder / f"{name}.json").write_text(look)
    _picture(folder / "photo.jpg")
    torch.manual_seed(0)
    weights = {f"trunk.{layer}.{one}.weight": torch.randn(16, 16) for layer in (0, 1) for one in "qk"}
    weights |= {f"trunk.{layer}.c_attn.weight": torch.randn(16, 48) for layer in (0, 1)}
    save_file(weights, folder / "odd.safetensors")
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(12), 100)
    people = rng.normal(size=(200, 4)).cumsum(1)
    np.savetxt(folder / "TABLE.csv", people, delimiter=",", header="age,sex,bmi,pressure", comments="")
    features = rng.normal(size=(1200, 8)) + 2 * rng.normal(size=(12, 8))[labels]
    first = np.argsort(-features[::60] @ features.T, axis=1)
    arrays = {"queries": features[::60], "database": features, "features": features, "labels": labels}
    for name, array in {**arrays, "first_round": first[:, :100]}.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _picture(path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pillow.fromarray(np.arange(3072, dtype=np.uint8).reshape(32, 32, 3)).save(path)


def _saved(folder: Path, name: str) -> Path:
    """A model that sees, and its processor."""
    pytest.importorskip("transformers")
    getattr(vision, name)().save_pretrained(folder)
    getattr(vision, f"{name}_processor")().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def seeing(place, tmp_path_factory):
    """Models that see are there, too."""
    _link(place / "path/to/seeing", _saved(tmp_path_factory.mktemp("seeing"), "vilt"))
    _link(place / "path/to/vit", _saved(tmp_path_factory.mktemp("vit"), "vit"))


@pytest.fixture(scope="module")
def scheduler():
    """The address of a cluster with one worker."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


def _names(word: str) -> list[str]:
    """What a shell makes of a word."""
    return sorted(map(str, Path().glob(word))) if word.startswith("models/") else [word]


@pytest.mark.parametrize("page", BY_PAGE)
def test_commands_run_one_after_the_other(page, place, tmp_path, monkeypatch, request):
    """In the order of the page and in one folder, as a reader would."""
    if any("--image" in command or "vit" in command for command in RUN[page]):
        request.getfixturevalue("seeing")
    for thing in place.iterdir():
        (tmp_path / thing.name).symlink_to(thing)
    monkeypatch.chdir(tmp_path)
    for command in RUN[page]:
        written = command.replace("/shared/", f"{tmp_path}/shared/")
        if SCHEDULER in written:
            written = written.replace(SCHEDULER, request.getfixturevalue("scheduler"))
        if not torch.cuda.is_available():
            written = written.replace("--device cuda", "--device auto")
        if "--image" in written:
            written = written.replace("path/to/model", "path/to/seeing")
        words = [name for word in shlex.split(written)[1:] for name in _names(word)]
        words += SMALLER if "--fit" in words else []
        if words == ["look"]:
            words += ["--tokens", "1500", "--length", "32"]
        if words[0] == "ablate" and "--text" in words:
            words += ["--tokens", "512", "--length", "16"]  # every head and part is run on the text
        done = CliRunner().invoke(cli.app, words, env={"COLUMNS": "100"})
        assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception!r}"
        for option in ("--html", "--json", "--csv", "--picture", "--save"):
            if option in words:
                assert Path(words[words.index(option) + 1]).stat().st_size, command


@pytest.mark.parametrize("number", range(len(READ)))
def test_commands_that_are_not_run_are_understood(number):
    """That each study runs from the command line is tested with it, in small."""
    command, words = _command(shlex.split(READ[number].replace(" ... ", " "))[1:])
    told = command.make_context(command.name, words).params
    assert "--json" not in words or told["json"] == Path(words[words.index("--json") + 1])


def _command(words):
    """The command that words begin with, and the words behind it."""
    assert words[0] in {*MODULES, "study"}, f"there is no command {words[0]}"
    command, words = load(words[0]), words[1:]
    while (commands := getattr(command, "commands", None)) and words != ["NAME"]:
        assert words, "a name is missing"
        assert words[0] in commands, f"there is no command {words[0]}"
        command, words = commands[words[0]], words[1:]
    return command, words


def test_what_is_said_in_passing_exists():
    """Programs' names, options, targets and extras that stand in sentences."""
    targets = _targets()
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    seen = 0
    for page in PAGES:
        text = page.read_text()
        for said in re.findall(r"`keyquery ([a-z][^`]*)`", text):
            command, words = _command(shlex.split(said))
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words if word.startswith("-")} <= known, f"{page.name}: keyquery {said}"
            seen += 1
        for target in re.findall(r"`make ([a-z-]+)", text):
            assert target in targets, f"{page.name}: make {target}"
        for named in re.findall(r"keyquery\[([a-z,]+)\]", text):
            assert set(named.split(",")) <= extras, f"{page.name}: keyquery[{named}]"
        for file in re.findall(r"python ((?:bench|docs)/\S+\.py)", text):
            assert (ROOT / file).exists(), f"{page.name}: {file}"
    assert seen > 20


def _targets() -> set[str]:
    """What make can be asked for; it says what it would do."""
    found = set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())
    for target in found:
        assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True).returncode == 0, target
    return found
