"""A real server, shared by tests that need one."""

import pytest
from support.serve_program import serving

from hardpoint.testing import write_scripted_model

KEY = "program-0123456789abcdef"
TOOLS = "user: call\nassistant: "


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """`hardpoint serve` with an engine process, a scripted model of a long context, and a key."""
    model = write_scripted_model(
        tmp_path_factory.mktemp("served"),
        {"user: hi\nassistant: ": "hello"},
        max_position_embeddings=1 << 15,
    )
    with serving(
        tmp_path_factory.mktemp("serving"),
        model,
        environment={"HARDPOINT_API_KEY": KEY},
        headers={"x-api-key": KEY},
    ) as running:
        yield running
