"""The executor "multiproc" passes the conformance suite."""

from collections.abc import Iterator

import pytest

from hardpoint.builtin_plugins.executors.multiproc import MultiprocExecutor
from hardpoint.testing import ExecutorSuite
from hardpoint.testing.running import executor_suite


@pytest.fixture(scope="module", autouse=True)
def _patient() -> Iterator[None]:
    """Wait longer for the end of processes than a user's suite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor_suite, "_CLOSE_SECONDS", 60.0)
        yield


class TestMultiproc(ExecutorSuite):
    executor = MultiprocExecutor
    parallel = ((2, 1),)
    examples = 0.2
    failure_seconds = 30.0


@pytest.mark.nightly
class TestMultiprocInMoreSizes(ExecutorSuite):
    executor = MultiprocExecutor
    parallel = ((1, 1), (1, 2), (2, 2), (3, 1))
    failure_seconds = 30.0
