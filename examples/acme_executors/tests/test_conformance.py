"""The executor keeps every rule, in any number of ranks."""

from acme_executors import ThreadExecutor

from hardpoint.testing import ExecutorSuite


class TestThreads(ExecutorSuite):
    executor = ThreadExecutor
    parallel = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3))
