"""Opening an engine: its log, the questions to the engine, and its recommended parameters."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal

import pytest
from support.internals import engine_of, input_processor_of

from hardpoint import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineConfig,
    EngineDeadError,
    ModelError,
    RequestError,
    SamplingParams,
    __version__,
    typed,
)
from hardpoint.core.build import build_engine
from hardpoint.core.engine.core import EngineCore
from hardpoint.host.registry import model_files
from hardpoint.plugins.config import ConfigSources
from hardpoint.process import build
from hardpoint.process.client.process_client import ProcessClient
from hardpoint.testing import scripted_config, write_scripted_model

APART = {"engine": {"in_process": False}}
RECOMMENDED = SamplingParams(temperature=0.25, top_k=7, top_p=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A scripted checkpoint that recommends how to sample."""
    folder = write_scripted_model(tmp_path_factory.mktemp("model"), {"say abc": " abc abc abc"})
    config = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "eos_token_id": 256, "max_length": 9}
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def opening_lines(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if ": loading the model " in r.getMessage()]


class TestLog:
    def test_settings_that_differ_are_logged_once_with_their_origin(self, scripted, caplog):
        scheduler = {"max_num_seqs": 3, "policy": "fair"}
        extra = {"scheduler": scheduler, "plugin": {"fair": {"tag": "s3cret"}}}
        config = scripted_config(scripted, extra)
        with caplog.at_level(logging.INFO, "hardpoint"), LLM(config=config, seed=7):
            (line,) = opening_lines(caplog)
        assert line.startswith(
            f"hardpoint {__version__}: loading the model {scripted} (argument LLM("
        )
        assert "scheduler.max_num_seqs = 3 (argument LLM(config=...))" in line
        assert "seed = 7 (argument LLM(seed=...))" in line
        assert "load.use = 'dummy'" in line
        assert "max_num_batched_tokens" not in line
        assert "kv_cache" not in line
        assert "s3cret" not in caplog.text

    def test_an_engine_process_logs_no_more(self, scripted, caplog):
        config = scripted_config(scripted, APART)
        with caplog.at_level(logging.INFO, "hardpoint"), LLM(config=config):
            (line,) = opening_lines(caplog)
        assert "engine.in_process = False (argument LLM(config=...))" in line


class TestTasks:
    @pytest.mark.parametrize("extra", [{}, APART], ids=["in_process", "own_process"])
    def test_they_are_known_when_it_is_open(self, scripted, extra):
        with LLM(config=scripted_config(scripted, extra)) as llm:
            assert llm.model.supported_tasks == ("generate", "embed", "token_embed")

    def test_of_async_llm_too(self, scripted):
        llm = AsyncLLM(config=scripted_config(scripted))
        assert llm.model.supported_tasks == ("generate", "embed", "token_embed")
        asyncio.run(llm.aclose())

    def test_a_model_that_cannot_generate_is_not_asked_to(self, scripted, monkeypatch):
        monkeypatch.setattr(EngineCore, "supported_tasks", lambda self: ["embed"])
        added = []
        monkeypatch.setattr(EngineCore, "add_request", lambda self, r: added.append(r))
        with LLM(config=scripted_config(scripted)) as llm:
            assert llm.model.supported_tasks == ("embed",)
            with pytest.raises(
                ValueError, match="generate: this model cannot do it; it can: embed"
            ):
                llm.generate(["a", "b"])
            with pytest.raises(RequestError, match="generate: this model cannot do it"):
                next(llm.stream("a"))
        assert added == []

    @pytest.mark.parametrize("face", [LLM, AsyncLLM])
    def test_an_engine_that_dies_before_it_can_be_asked(self, scripted, monkeypatch, face):
        clients = []

        class Killed(ProcessClient):
            def __init__(self, *given):
                super().__init__(*given)
                clients.append(self)
                os.kill(self.pid, signal.SIGKILL)

        monkeypatch.setattr(build, "ProcessClient", Killed)
        with pytest.raises(EngineDeadError):
            face(config=scripted_config(scripted, APART))
        (client,) = clients
        with pytest.raises(ProcessLookupError):  # it was waited for, so nothing is left of it
            os.kill(client.pid, 0)


def test_the_core_alone_refuses_an_engine_in_another_process(scripted):
    config = typed.convert(scripted_config(scripted, APART), EngineConfig, path="")
    sources = ConfigSources({"engine.in_process": "argument --apart"})
    words = r"^engine.in_process: expected true, got false; hardpoint.process .*argument --apart"
    with pytest.raises(ConfigError, match=words):
        build_engine(config, sources)


class TestDefaultParams:
    @pytest.mark.parametrize("call", ["generate", "chat", "stream", "stream_chat"])
    def test_they_count_where_nothing_is_given(self, folder, monkeypatch, call):
        with LLM(config=scripted_config(folder)) as llm:
            assert llm.model.default_sampling_params() == RECOMMENDED
            received = []
            client = llm.llm_engine.parts.client
            add = client.add_request
            monkeypatch.setattr(client, "add_request", lambda r: (received.append(r), add(r)))
            given = "x" if call in ("generate", "stream") else [{"role": "user", "content": "x"}]
            for params in (None, SamplingParams(temperature=1.0, max_tokens=3)):
                list(getattr(llm, call)(given, params))
        chosen = [(r.params.temperature, r.params.top_k, r.params.top_p) for r in received]
        assert chosen == [(0.25, 7, 0.5), (1.0, 0, 1.0)]
        assert set(received[0].plugin_args) >= {"temperature", "top_k", "top_p"}

    async def test_an_event_loop_has_them_too(self, folder):
        async with AsyncLLM(config=scripted_config(folder)) as llm:
            assert llm.model.default_sampling_params() == RECOMMENDED
            output = [o async for o in llm.generate("say abc")][-1]
            assert output.outputs[0].text == " abc abc abc"

    def test_they_are_made_at_first_use_and_once(self, folder):
        with LLM(config=scripted_config(folder)) as llm:
            assert input_processor_of(engine_of(llm))._default_params is None
            assert llm.model.default_sampling_params() is llm.model.default_sampling_params()

    def test_an_alias_recommends_what_the_card_does(self, scripted, folder, monkeypatch):
        card = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
        assert model_files.ALIASES["smollm2"].sampling == card
        for path, expected in ((scripted, SamplingParams(**card)), (folder, RECOMMENDED)):
            monkeypatch.setattr(model_files, "_packaged", lambda *_, path=path: path)
            with LLM(config={**scripted_config(scripted), "model": "smollm2"}) as llm:
                assert llm.model.default_sampling_params() == expected, "files come before the card"

    def test_without_a_word_they_are_the_plain_ones(self, scripted):
        with LLM(config=scripted_config(scripted)) as llm:
            assert llm.model.default_sampling_params() == SamplingParams()

    def test_what_no_request_may_ask_for_is_refused_at_once(self, tmp_path):
        folder = write_scripted_model(tmp_path / "model")
        (folder / "generation_config.json").write_text('{"top_p": 2}')
        words = "model/generation_config.json: top_p: expected a number <= 1, got 2"
        with pytest.raises(ModelError, match=words):
            LLM(config=scripted_config(folder))
