"""Every test runs with shapes checked, uninitialised memory poisoned, and one thread a process."""

import gc
import os
import sys
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path

gc.disable()  # until all is imported: what is made meanwhile stays, and is not to be looked at again and again

os.environ.setdefault("MPLBACKEND", "agg")
# Some virtual machines report AMX and do not allow it: a bfloat16 product would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from jaxtyping import config

import tests.shapes

tests.shapes.install(["keyquery", "keyquery_studies"])

import hypothesis
import pytest
import torch

import keyquery as kq

ROOT = Path(__file__).parent
# Pages whose examples train, resample, or analyse a model on text: more than a few seconds each.
SLOW_PAGES = {
    *("ablate", "atlas", "attention", "choosing", "datapoints", "events", "primal", "rerank", "series", "survey"),
    *("transport", "vision_language", "words"),
    *("studies/circuit", "studies/lineage", "studies/objectives", "studies/vision_language"),
}
# Examples that train.
SLOW_EXAMPLES = {
    "keyquery.learn.npt.estimators.NPTRegressor",
    "keyquery.learn.series.classifier.SeriesClassifier",
    "keyquery.learn.vision_language.parser.VisualParser",
    "keyquery.testing.kernels.check_kernel",
    "keyquery_studies.dial.study.run",
}
collect_ignore = ["docs/site"]  # what `make docs` runs; it needs the extra docs

if not torch.cuda.is_available():  # kernels run in Triton's interpreter; it must know before it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("default", deadline=None, max_examples=10, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=100, derandomize=True)  # make test-all
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _house_rules(request):
    torch.set_num_threads(1)
    # Deterministic mode fills torch.empty with NaN, so that reading what was never written shows.
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    config.update("jaxtyping_disable", request.node.get_closest_marker("unchecked") is not None)
    yield
    config.update("jaxtyping_disable", False)
    torch.use_deterministic_algorithms(False)
    if "matplotlib.pyplot" in sys.modules:  # figures of one test would be counted, and warned of, in another
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(autouse=True)
def _names_of_examples(doctest_namespace):
    doctest_namespace.update(torch=torch, kq=kq)


def pytest_collection():
    """Import from the other end where two processes import the same: each finds half of it compiled by the other."""
    if int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2:
        for file in sorted((ROOT / "tests").rglob("test_*.py"), reverse=True):
            with suppress(Exception, pytest.skip.Exception):  # which are raised again where they are reported
                import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_finish():
    """Leave what was imported out of every later collection of garbage."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # of few objects that are left, ten times as many before they are looked at
    gc.enable()


LONG_FILES = ("README.md", "tests/test_", "tests/studies/", "tests/survey/")  # of seconds per test


def pytest_collection_modifyitems(items):
    """Leave slow pages and examples, and all but the first cases of tests marked `few`, to `make test-all`."""
    pages = {f"docs/{page}.md" for page in SLOW_PAGES}
    cases = Counter()
    for item in items:
        name, few = item.nodeid.partition("[")[0], item.get_closest_marker("few")
        cases[name] += 1
        file, _, example = name.partition("::")
        if file in pages or example in SLOW_EXAMPLES or (few and cases[name] > few.args[0]):
            item.add_marker(pytest.mark.slow)
    # A worker that meets one of these last would keep the other waiting.
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_FILES))


def pytest_terminal_summary(terminalreporter):
    """Tests of the page that could not be run are told aloud: a page that nobody opened is not tested."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "no chromium" in str(report.longrepr)]
    if skipped:
        words = f"{len(skipped)} tests of the page did NOT run: no chromium here; apt-get install chromium"
        terminalreporter.write_sep("!", words, yellow=True, bold=True)
