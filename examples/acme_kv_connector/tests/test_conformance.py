"""The connector keeps the rules of the conformance kit."""

from acme_kv_connector import LayeredFiles

from hardpoint.testing import KVConnectorSuite

pytest_plugins = ["hardpoint.testing"]


class TestLayeredFiles(KVConnectorSuite):
    connector = LayeredFiles
    options = {"path": "{folder}"}
