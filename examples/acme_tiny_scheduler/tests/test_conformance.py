"""The scheduler keeps every rule of the engine: the conformance kit checks it."""

from tiny_scheduler import TinyScheduler

from hardpoint.testing import SchedulerSuite

pytest_plugins = ["hardpoint.testing"]


class TestTinyScheduler(SchedulerSuite):
    scheduler = TinyScheduler
    uses_policy = False
