"""The scripted model's tokenizer, and engines with a plugin of a test's own."""

from __future__ import annotations

import pytest
from support.engines import build_engine

from hardpoint import typed
from hardpoint.plugins import EngineConfig
from hardpoint.testing import scripted_config, scripted_engine


@pytest.fixture(scope="session")
def byte_tokenizer(scripted):
    """The scripted model's tokenizer: one token per byte."""
    engine = scripted_engine(scripted)
    engine.close()
    return engine.parts.tokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["in_process", "own_process"])
def meddled(request, scripted):
    """An engine with the plugin `Meddler` of the test's module, here and in its own process."""
    config = scripted_config(
        scripted,
        {
            "engine": {"in_process": request.param},
            "plugins": {
                "enable": [{"use": f"{request.module.__name__}:Meddler", "name": "meddler"}]
            },
        },
    )
    engine = build_engine(typed.convert(config, EngineConfig, path=""))
    yield engine
    engine.close()
