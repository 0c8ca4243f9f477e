"""Sink and publisher keep the rules of their kinds: the conformance kit checks them."""

import tempfile
from pathlib import Path

from acme_observing import EventLines, JsonLines, RequestTable

from hardpoint.testing import KVEventPublisherSuite, StatSinkSuite

pytest_plugins = ["hardpoint.testing"]
FOLDER = Path(tempfile.mkdtemp())


class TestRequestTable(StatSinkSuite):
    sink = RequestTable
    options = {"path": str(FOLDER / "requests.csv")}


class TestJsonLines(StatSinkSuite):
    sink = JsonLines
    options = {"path": str(FOLDER / "requests.jsonl")}


class TestEventLines(KVEventPublisherSuite):
    publisher = EventLines
    options = {"path": str(FOLDER / "events.jsonl")}
