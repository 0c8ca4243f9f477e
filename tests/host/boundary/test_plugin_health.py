"""Faults of plugins: what is counted, and what is kept for frontends that come later."""

from __future__ import annotations

import asyncio

import pytest

from hardpoint.configuration.loading import config_from
from hardpoint.host.boundary.plugin_health import PluginHealth
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import RequestError
from hardpoint.plugins.component.manifest import Manifest, PluginEntry
from hardpoint.replicas.relay import owner as relay_owner
from hardpoint.replicas.relay.messages import Notice
from hardpoint.testing import scripted_config
from hardpoint.workers.owner import OwnerLLM

STRANGER = PluginEntry(
    kind="logits_processors", name="acme", value="acme:Acme", distribution="acme", version="1.0"
)
PLUGINS = PluginSet(Manifest(hardpoint="9.9", entries=(STRANGER,)))


def health(quarantine_after=3):
    return PluginHealth(PLUGINS, quarantine_after)


def faults(of):
    return of.report({}, {}).faults


def test_distinct_requests_count():
    found = health()
    for request_id in ("a", "a", "b", "a", "b"):
        found.record("acme", request_id, f"it raised for {request_id}")
        found.check("acme")
    assert faults(found) == {"acme": 2}
    found.record("acme", "c", "it raised")
    with pytest.raises(RequestError, match="for it ended 3 requests; the first: it raised for a"):
        found.check("acme")


def test_ids_of_requests_that_ended_are_not_kept_for_ever():
    found = health()
    for number in range(5000):
        for _ in range(2):  # two completions of one request
            found.record("temperature", str(number), "it raised")
    assert faults(found) == {"temperature": 5000}
    assert len(found.newest["temperature"]) == 1000
    found.check("temperature")


def test_a_limit_that_changes_counts_what_was_before():
    found = health(quarantine_after=0)
    for number in range(1500):
        found.record("acme", str(number), "it raised")
    found.check("acme")
    found.use(PLUGINS, 1500)
    with pytest.raises(RequestError, match="ended 1500 requests"):
        found.check("acme")


class Frontend:
    """A link whose frontend does not run."""

    def __init__(self, *_):
        self.token, self.notices = str(id(self)), []

    def notify(self, notice):
        self.notices.append(notice)


def test_a_frontend_that_comes_later_gets_one_notice_per_plugin_and_topic(scripted, monkeypatch):
    monkeypatch.setattr(relay_owner, "Link", Frontend)

    async def scenario():
        config, sources = config_from(scripted_config(scripted), {}, caller="a test")
        owner = OwnerLLM.open(config, sources, "never")
        try:
            first, second = (owner.shared.connect(None) for _ in range(2))
            for number in range(50):
                for link in (first, second):  # whose requests have the same ids
                    owner.add_fault(link, "temperature", f"fault {number}", str(number))
            owner.add_fault(first, "acme", "the engine died", None)
            assert len(second.notices) == 51
            for version in range(3):
                owner.shared.notify(Notice("load", version))
            assert (await owner.plugins.health()).faults == {"temperature": 100}
            later = owner.shared.connect(None)
        finally:
            await owner.aclose()
        return later

    load, *of_plugins = asyncio.run(scenario()).notices
    assert load == Notice("load", 2)
    assert [notice.topic for notice in of_plugins] == ["fault", "fault"]
    found = health()
    for notice in of_plugins:
        found.add(*notice.value)
    assert faults(found) == {"temperature": 100}
    assert found.first["temperature"] == "fault 0"
    with pytest.raises(RequestError, match="the plugin is quarantined: the engine died"):
        found.check("acme")
