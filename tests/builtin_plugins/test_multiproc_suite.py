"""The executor "multiproc" passes the conformance suite."""

import pytest

from hardpoint.builtin_plugins.executors.multiproc import MultiprocExecutor
from hardpoint.testing import ExecutorSuite


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
