"""A journal that several test files use."""

from __future__ import annotations

import shutil

import pytest
from support.journal.schedules import record

from hardpoint.testing import write_scripted_model


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """A folder with the model of a journal, and the journal; nobody writes to it."""
    folder = tmp_path_factory.mktemp("recorded")
    model = write_scripted_model(folder / "model")
    record(range(100, 103), model, folder / "journal")
    return folder


@pytest.fixture
def journal(recorded, tmp_path):
    """A copy of the journal."""
    return shutil.copy(recorded / "journal", tmp_path / "journal")
