"""The communicator keeps every rule of its kind: the conformance kit checks it."""

from acme_communicators import Traffic

from hardpoint.testing import CommunicatorSuite

pytest_plugins = ["hardpoint.testing"]


class TestTraffic(CommunicatorSuite):
    communicator = Traffic
    options = {"wraps": "shared_memory"}
    sizes = (2,)
