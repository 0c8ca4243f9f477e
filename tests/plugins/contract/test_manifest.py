"""The manifest's hash: equal exactly where the engines would do the same."""

from __future__ import annotations

import msgspec
import pytest
from support.plugins.fake import component

from hardpoint.plugins import LogitsProcessor, Options
from hardpoint.plugins.component.manifest import Manifest, PluginEntry
from hardpoint.plugins.config import ConfigSources

ENTRY = PluginEntry(
    kind="logits_processors",
    name="dry",
    value="acme:Dry",
    distribution="acme-pack",
    version="2.0",
    options={"a": 1, "b": {"c": [1, 2]}},
    origin="file hardpoint.toml",
    place=1,
)
OTHER = PluginEntry(
    kind="samplers", name="default", value="x:Y", distribution="hardpoint", version="0.1"
)


def hash_of(*entries, hardpoint="0.1.0"):
    return Manifest(hardpoint=hardpoint, entries=entries).hash


def changed(**fields):
    return msgspec.structs.replace(ENTRY, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "wet"},
        {"kind": "samplers"},
        {"value": "acme:Other"},
        {"distribution": "acme-fork"},
        {"version": "2.1"},
        {"options": {"a": 2, "b": {"c": [1, 2]}}},
        {"options": {}},
        {"place": 2},
    ],
)
def test_changes_with(fields):
    assert hash_of(changed(**fields)) != hash_of(ENTRY)


def test_changes_with_the_engines_version():
    assert hash_of(ENTRY, hardpoint="0.2.0") != hash_of(ENTRY)


def test_does_not_change_with_origin_nor_order_of_options_nor_of_entries():
    assert hash_of(changed(origin="environment")) == hash_of(ENTRY)
    assert hash_of(changed(options={"b": {"c": [1, 2]}, "a": 1})) == hash_of(ENTRY)
    assert hash_of(ENTRY, OTHER) == hash_of(OTHER, ENTRY)


def test_does_not_change_with_the_generation():
    first = Manifest(hardpoint="1", entries=(ENTRY,))
    assert msgspec.structs.replace(first, generation=2).hash == first.hash


def test_travels_as_msgpack():
    manifest = Manifest(hardpoint="0.1.0", entries=(ENTRY, OTHER), generation=3)
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
    assert there == manifest
    assert there.hash == manifest.hash


class TestOfAResolvedSet:
    @pytest.fixture
    def hash_with(self, installed):
        class DryOptions(Options):
            base: float = 2.0

        for name in ("dry", "wet"):
            target = component(LogitsProcessor, Options=DryOptions)
            installed.offer(f"logits_processors/{name}", target)

        def run(*enable, config_sources=None, **config):
            plugins = installed.resolve(config_sources, plugins={"enable": list(enable)}, **config)
            return plugins.manifest.hash

        return run

    def test_options_change_it_unless_they_are_the_default(self, hash_with):
        assert hash_with("dry", plugin={"dry": {"base": 3.0}}) != hash_with("dry")
        assert hash_with("dry", plugin={"dry": {"base": 2.0}}) == hash_with("dry")

    def test_the_order_of_enabling_changes_it(self, hash_with):
        assert hash_with("dry", "wet") != hash_with("wet", "dry")

    def test_enabling_changes_it(self, hash_with):
        assert len({hash_with(), hash_with("dry"), hash_with("dry", "wet")}) == 3

    def test_where_it_was_enabled_does_not(self, hash_with):
        config_sources = ConfigSources({"plugins": "environment"})
        assert hash_with("dry", config_sources=config_sources) == hash_with("dry")
