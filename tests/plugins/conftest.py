"""Fixtures of the contract's tests."""

from __future__ import annotations

import pytest
from support.plugins.fake import Installed


@pytest.fixture
def installed(monkeypatch):
    """Fake built-ins and whatever the test adds; nothing of it stays."""
    return Installed(monkeypatch)
