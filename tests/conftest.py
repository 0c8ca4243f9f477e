from pathlib import Path

import pytest

from hardpoint.testing import write_scripted_model


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the scripted model, with a few fixed replies."""
    return write_scripted_model(
        tmp_path_factory.mktemp("scripted"),
        {
            "say abc": " abc abc abc",
            "emoji": "go 😀 on",
            "long": "0123456789" * 8,
            "user: hi\nassistant: ": "hello",
        },
    )
