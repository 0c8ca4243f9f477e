"""Engines that a test plays, for the tests of their client."""

from __future__ import annotations

import pytest
from support.core.played_engines import World


@pytest.fixture
def world(monkeypatch):
    world = World(monkeypatch)
    yield world
    for group in world.groups:
        group.close()
