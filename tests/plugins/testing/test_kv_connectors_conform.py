"""Every built-in KV connector passes the public conformance kit."""

from __future__ import annotations

import pytest
from support.kit_suites import assert_tests_builtins
from support.searching import kit_examples

from hardpoint.builtin_plugins.kv_connectors.stores import StoresConnector
from hardpoint.testing import KVConnectorSuite
from hardpoint.testing.kv.storage import storage_at

pytest_plugins = ["hardpoint.testing"]


class Stores(KVConnectorSuite):
    examples = kit_examples()
    connector = StoresConnector
    name = "stores"
    config = {
        "kv_connector": {
            "use": "stores",
            "stores": [{"use": "hardpoint.testing.kv.storage:UnreliableStore", "name": "store"}],
        },
        "plugin": {"store": {"place": "{folder}"}},
    }

    def disturb(self, folder, fault):
        storage_at(str(folder)).become(fault)


_IN_TIME = pytest.mark.skip(reason="TestStoresInTime has it, with short limits of time")


class TestStores(Stores):
    """Waits long for storage, which a busy machine makes slow."""

    options = {"timeout_seconds": 60.0}

    @_IN_TIME
    def test_storage(self):
        """Storage fails."""

    @_IN_TIME
    def test_time(self):
        """Storage is slow."""

    @_IN_TIME
    def test_release(self):
        """Storage does not answer."""


class TestStoresInTime(Stores):
    """Gives storage up that does not answer."""

    options = {"timeout_seconds": 0.1, "breaker_failures": 3, "breaker_seconds": 0.1}


def test_every_built_in_is_tested():
    assert_tests_builtins("kv_connectors", "connector", globals())
