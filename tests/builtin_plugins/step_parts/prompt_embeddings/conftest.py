"""The model of these tests."""

import pytest
from support.embedded import EmbeddedModel


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    return EmbeddedModel(tmp_path_factory.mktemp("model"))
