"""The plugin keeps every rule of hooks: the conformance kit checks it."""

from acme_server import AcmeServer

from hardpoint.testing import HookSuite

pytest_plugins = ["hardpoint.testing"]


class TestAcmeServer(HookSuite):
    hooks = AcmeServer
