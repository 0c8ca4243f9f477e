"""The executor "multiproc" passes the conformance suite."""

from hardpoint.builtin_plugins.executors.multiproc import MultiprocExecutor
from hardpoint.plugins import Executor
from hardpoint.testing import ExecutorSuite


class TestMultiproc(ExecutorSuite):
    executor = MultiprocExecutor
    parallel = ((2, 1), (1, 2))
