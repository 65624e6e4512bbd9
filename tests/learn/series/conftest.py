"""Epochs of one pass keep the tests short; the default is several passes over a small set."""

import pytest

from keyquery.learn.series import classifier


@pytest.fixture(autouse=True, scope="package")
def short_epochs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifier, "BATCHES", 1)
        yield
