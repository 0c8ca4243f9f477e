"""Real servers, shared by tests that need one."""

import pytest
from support.scripted_server import scripted_server
from support.serve_program import KEYS, serving

from hardpoint.testing import write_scripted_model


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """`hardpoint serve` with an engine process, a scripted model of a long context, and keys."""
    model = write_scripted_model(
        tmp_path_factory.mktemp("served"),
        {"user: hi\nassistant: ": "hello"},
        max_position_embeddings=1 << 15,
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    folder = tmp_path_factory.mktemp("serving")
    tables = [f'[[key]]\nname = "{name}"\nkey = "{KEYS[name]}"\n' for name in ("alice", "bob")]
    (folder / "keys.toml").write_text("\n".join(tables))
    (folder / "keys.toml").chmod(0o600)
    with serving(
        folder,
        model,
        'server.keys_file = "keys.toml"',
        environment={"HARDPOINT_API_KEY": KEYS["single"]},
        headers={"x-api-key": KEYS["single"]},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of the scripted model in this process."""
    with scripted_server(tmp_path_factory.mktemp("model")) as running_server:
        yield running_server
