"""Every test runs with shapes checked, uninitialised memory poisoned, and one thread a process."""

import os
import sys

os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("KEYQUERY_NO_PROOFS", "1")  # reading proves nothing by itself, and writes to no user's cache

from jaxtyping import config, install_import_hook

import tests.shapes

install_import_hook(["keyquery", "keyquery_studies"], f"{tests.shapes.__name__}.checked")

import hypothesis
import pytest
import torch

import keyquery as kq

# Pages whose examples train, or analyse a model on text: more than a few seconds each.
SLOW_PAGES = {
    *("ablate", "atlas", "attention", "choosing", "datapoints", "events", "primal", "rerank", "series", "transport"),
    *("vision_language", "studies/objectives", "studies/vision_language"),
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


def pytest_collection_modifyitems(items):
    """Leave the slow pages to `make test-all`."""
    pages = {f"docs/{page}.md" for page in SLOW_PAGES}
    for item in items:
        if item.nodeid.partition("::")[0] in pages:
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter):
    """Tests of the page that could not be run are told aloud: a page that nobody opened is not tested."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "no chromium" in str(report.longrepr)]
    if skipped:
        words = f"{len(skipped)} tests of the page did NOT run: no chromium here; apt-get install chromium"
        terminalreporter.write_sep("!", words, yellow=True, bold=True)
