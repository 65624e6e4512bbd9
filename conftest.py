"""Every test runs with shapes checked, uninitialised memory poisoned, and one thread a process."""

import os
import sys
from collections import Counter

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
}
collect_ignore = ["docs/site"]  # what `make docs` runs; it needs the extra docs

if not torch.cuda.is_available():  # kernels run in Triton's interpreter; it must know before it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("default", deadline=None, max_examples=10, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=100, derandomize=True)  # make test-all
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _one_thread_and_checked_shapes(request):
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
    """Tests of the page that could not be run are reported: a page that nobody opened is not tested."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "no chromium" in str(report.longrepr)]
    if skipped:
        words = f"{len(skipped)} tests of the page did NOT run: no chromium here; apt-get install chromium"
        terminalreporter.write_sep("!", words, yellow=True, bold=True)
