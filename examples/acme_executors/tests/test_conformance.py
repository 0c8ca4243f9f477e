"""The executor keeps the rules of the conformance kit, in any number of ranks."""

from acme_executors import ThreadExecutor

from hardpoint.testing import ExecutorSuite

pytest_plugins = ["hardpoint.testing"]


class TestThreads(ExecutorSuite):
    executor = ThreadExecutor
    parallel = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1))
