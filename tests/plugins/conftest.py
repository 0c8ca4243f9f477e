"""Fixtures of the contract's tests."""

from __future__ import annotations

import pytest
from fake_plugins import Installed


@pytest.fixture
def installed(monkeypatch):
    """Fake built-ins and whatever the test adds; nothing of it stays."""
    return Installed(monkeypatch)
