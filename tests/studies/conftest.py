"""What studies are tried on."""

import pytest

import keyquery as kq


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "tale.txt"
    path.write_text(kq.models.TEXT.read_text() * 6)
    return path
