"""Companions of an engine: opened before weights are read, closed with it; they count faults."""

from __future__ import annotations

import pytest

from hardpoint import typed
from hardpoint.core.build import build_engine, prepare_engine
from hardpoint.core.frontend.engine_parts import Companion
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.errors import EngineDeadError, PluginLoadError
from hardpoint.plugins import EngineConfig, Tokenizer
from hardpoint.plugins.config import ConfigSources
from hardpoint.testing import scripted_config


class Own(Companion):
    """Keeps what it was opened with."""

    def __init__(self, opening):
        self.opening, self.tokenizer = opening, opening.new_tokenizer()
        self.health, self.closed = None, 0

    def report_to(self, health):
        self.health = health

    def close(self):
        self.closed += 1


class Other(Own):
    pass


def config_of(folder):
    return typed.convert(scripted_config(folder), EngineConfig, path="")


def test_they_are_opened_found_by_class_and_closed_with_the_engine(scripted):
    engine = build_engine(config_of(scripted), companions=[Other, Own])
    other, own = engine.parts.companions
    assert engine.parts.companion(Other) is other
    assert type(own) is Own
    assert isinstance(own.tokenizer, Tokenizer)
    assert own.tokenizer is not other.tokenizer
    assert own.opening.model_config is engine.parts.model_config
    own.health.record("mine", "r", "it failed")
    assert engine.health().faults == {"mine": 1}
    assert (own.closed, other.closed) == (0, 0)
    engine.close()
    assert (own.closed, other.closed) == (1, 1)


def test_one_that_cannot_be_opened_closes_those_before_it(scripted):
    opened = []

    def open_own(opening):
        opened.append(Own(opening))
        return opened[-1]

    def fail(opening):
        raise PluginLoadError("no such file")

    with pytest.raises(PluginLoadError, match="^no such file$"):
        build_engine(config_of(scripted), companions=[open_own, fail])
    assert [one.closed for one in opened] == [1]


def test_an_engine_core_that_cannot_be_opened_closes_them(scripted):
    seen = []

    def open_client(prepared):
        seen.append(prepared)
        raise EngineDeadError("no such host")

    prepared = prepare_engine(config_of(scripted), ConfigSources(), companions=[Other, Own])
    assert [one.closed for one in prepared.companions] == [0, 0]
    with pytest.raises(EngineDeadError, match="^no such host$"):
        prepared.open(open_client, LLMEngine)
    assert seen == [prepared]
    assert [one.closed for one in prepared.companions] == [1, 1]
