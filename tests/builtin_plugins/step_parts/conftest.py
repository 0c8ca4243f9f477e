"""Jobs of the scripted model, and the output of each alone."""

from __future__ import annotations

import pytest
from support.driving import alone, varied_jobs
from support.searching import searches_long

from hardpoint.testing import scripted_engine


@pytest.fixture(scope="session")
def jobs():
    return varied_jobs(24 if searches_long() else 12)


@pytest.fixture(scope="session")
def expected(scripted, jobs):
    engine = scripted_engine(scripted)
    yield alone(engine, jobs)
    engine.close()
