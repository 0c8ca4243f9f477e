"""Engines in processes of their own, as tests want them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.process.fork_server import FORKED_RANKS
from support.process.harness import PATIENCE_S, Opened, wait_until

from hardpoint.testing import write_scripted_model


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scripted checkpoint with a context long enough for requests that must not end."""
    return write_scripted_model(tmp_path_factory.mktemp("endless"), max_position_embeddings=1 << 15)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engine processes start their ranks by forks."""
    monkeypatch.setenv(FORKED_RANKS, "1")


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Open engines; each is closed, and its process must be gone, when the test ends."""
    opened = Opened()
    yield opened
    pids = opened.close()
    wait_until(
        lambda: all(not Path(f"/proc/{pid}").exists() for pid in pids), PATIENCE_S, "processes"
    )
