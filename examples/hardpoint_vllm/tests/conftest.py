import os

import pytest

from hardpoint.testing import write_scripted_model

long = pytest.mark.skipif(
    float(os.environ.get("HARDPOINT_EXAMPLES", "1")) < 1, reason="HARDPOINT_EXAMPLES is below 1"
)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory):
    """The folder of the scripted model."""
    return write_scripted_model(tmp_path_factory.mktemp("scripted"))
