"""`python -m keyquery_studies NAME`: a study from a source tree that is not installed."""

import keyquery.cli  # noqa: F401  # first: where the package is installed, it loads these studies as a plugin
from keyquery.support.plugins import register
from keyquery_studies import registry
from keyquery_studies.cli import study

if __name__ == "__main__":
    register(registry)
    study()
