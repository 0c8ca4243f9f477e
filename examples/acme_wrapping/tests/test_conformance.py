"""The executor keeps every rule of the engine: the conformance kit checks it."""

import tempfile
from pathlib import Path

from acme_wrapping import TimedExecutor

from hardpoint.testing import ExecutorSuite

pytest_plugins = ["hardpoint.testing"]


class TestTimedExecutor(ExecutorSuite):
    executor = TimedExecutor
    name = "timed"
    options = {"log": str(Path(tempfile.mkdtemp()) / "steps.log")}
