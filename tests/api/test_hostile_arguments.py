"""Whatever callers pass, they get a short error of Hardpoint's tree, and the model goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from support.internals import engine_of

from hardpoint import LLM, ConfigError, HardpointError, ModelError, RequestError, SamplingParams
from hardpoint.configuration.loading import config_from
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.plugins import EngineConfig, EngineCoreRequest
from hardpoint.testing import scripted_config

CYCLE = []
CYCLE.append(CYCLE)
TABLE_CYCLE = {}
TABLE_CYCLE["a"] = TABLE_CYCLE
DEEP = []
for _ in range(20_000):
    DEEP = [DEEP]


class NoRepr:
    def __repr__(self):
        raise LookupError("no repr")

    __str__ = __repr__


class RaisingList(list):
    def __len__(self):
        raise LookupError("no length")

    def __iter__(self):
        raise LookupError("no items")


class RaisingSequence(Sequence):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise LookupError(NoRepr())


class RaisingMapping(Mapping):
    def __len__(self):
        return 1

    def __iter__(self):
        raise LookupError("no keys")

    def __getitem__(self, key):
        raise LookupError("no values")


def raising():
    yield "x"
    raise LookupError("no more")


VALUES = {
    "bytes": b"x",
    "surrogate": "\ud800",
    "surrogates": {"\udfff": ["\ud800"]},
    "nan": math.nan,
    "huge": 10**5000,
    "cycle": CYCLE,
    "table_cycle": TABLE_CYCLE,
    "deep": DEEP,
    "long": "y" * 20_000,
    "long_key": {"k" * 20_000: 1},
    "no_repr": NoRepr(),
    "list": RaisingList([1]),
    "sequence": RaisingSequence(),
    "mapping": RaisingMapping(),
    "generator": raising(),
}


def survives(call, *args, **kwargs):
    """Call; it may work, or raise a short error of Hardpoint's tree that any terminal can show."""
    try:
        call(*args, **kwargs)
    except HardpointError as error:
        message = str(error)
        message.encode()
        assert len(message) < 2100
        assert message.count("\n") < 3


@pytest.fixture(scope="module")
def llm(scripted):
    with LLM(config=scripted_config(scripted), progress=False) as llm:
        yield llm
        assert llm.generate("say abc")[0].outputs[0].text  # undisturbed by all that went wrong
        assert llm.engines.scheduler_stats().num_running == 0


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
class TestAnyValue:
    def test_in_any_sampling_parameter(self, llm, value):
        for field in SamplingParams.__struct_fields__:
            for given in (value, [value]):
                survives(llm.generate, "x", SamplingParams(**{"max_tokens": 1, field: given}))

    def test_as_any_argument_of_a_request(self, llm, value):
        few = SamplingParams(max_tokens=1)
        for given in (value, [value], {"prompt": value}, {"prompt_token_ids": value}):
            survives(llm.generate, given, few)
            survives(llm.stream, given, few)
            survives(llm.generate, "x", given)
            survives(llm.embed, given)
            survives(llm.embed, "x", given)
            survives(llm.score, "x", given)
            survives(llm.chat, given, few)
            survives(llm.chat, [given], few)
            survives(llm.stream_chat, given, few)
            for name in ("priority", "timeout", "tags", "cache_salt"):
                survives(llm.generate, "x", few, **{name: given})
        for name in ("type", "prompt", "prompt_token_ids", "cache_salt", "arrival_time"):
            token = {"type": "token", "prompt_token_ids": [1], name: value}
            survives(llm.generate, token, few)
        for message in ({"role": value}, {"content": value}, {"more": value}):
            message = {"role": "user", "content": "hi", **message}
            survives(llm.chat, [message], few)
        survives(llm.generate, "x", few, tags={"a": value})

    def test_in_a_request_made_elsewhere(self, llm, value):
        engine = engine_of(llm)
        for field in EngineCoreRequest.__struct_fields__:
            given = {"request_id": "r", "prompt_token_ids": [1], "params": SamplingParams()}
            survives(engine.add_request, "r", EngineCoreRequest(**{**given, field: value}))
        engine.abort_requests("r")

    def test_in_calls_of_the_engine(self, llm, value):
        engine = engine_of(llm)
        survives(engine.add_request, value, "x")
        survives(engine.add_request, "r", "x", None, value)
        survives(engine.add_request, "r", "x", None, RequestExtras(trace_headers=value))
        for given in (value, [value]):
            survives(engine.abort_requests, given)
        engine.abort_requests("r")
        survives(engine.why_waiting, value)
        survives(engine.step, value)
        survives(engine.call_utility, value)
        survives(engine.call_utility, "pause", value)
        survives(llm.plugins.set_policy, value)
        survives(llm.plugins.set_policy, "fair", value)
        survives(llm.plugins.set_policy, "fair", {"tag": value})
        engine.call_utility("resume")
        assert llm.generate("say abc", SamplingParams(temperature=0))[0].outputs[0].text

    def test_in_the_configuration(self, scripted, value):
        survives(config_from, value)
        for field in ("model", "dtype", "max_model_len", "seed", "plugins", "plugin", "engine"):
            for given in (value, [value], {"enable": value}, {"replace": value}):
                survives(config_from, {field: given})
        for name in ("model", "dtype", "seed", "tokenizer", "progress"):
            survives(LLM, **{"model": "nowhere", name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"seed": "\ud800"},
            r"seed: expected text that UTF-8 can hold, got '\ud800' at character 0",
        ),
        ({"stop": b"x"}, "stop: expected a string or a list, got b'x'"),
        ({"stop": ["a", b"x"]}, "stop[1]: expected a string, got b'x'"),
        (
            {"bad_words": CYCLE},
            "value: expected plain data, got a SamplingParams that is nested too",
        ),
        (
            {"max_tokens": 10**5000},
            "max_tokens: expected a whole number of at most 64 bits, got a int",
        ),
    ],
)
def test_sampling_parameters(llm, fields, message):
    with pytest.raises(RequestError) as caught:
        llm.generate("x", SamplingParams(**fields))
    assert str(caught.value).startswith(message)


def test_prompts_and_messages(llm):
    with pytest.raises(RequestError, match="^messages: expected a list of messages, .* got a int$"):
        llm.chat(5)
    message = {"role": "user", "content": "half \ud800"}
    with pytest.raises(
        RequestError, match=r"^messages\[0\]\.content: expected text that UTF-8 can"
    ):
        llm.chat([message])
    with pytest.raises(
        RequestError, match=r"^prompts\[1\]: reading it failed: LookupError: no items$"
    ):
        llm.generate(["x", RaisingList()])
    with pytest.raises(RequestError, match="^cache_salt: expected a string or nothing, got b'x'$"):
        llm.generate("x", cache_salt=b"x")
    with pytest.raises(
        RequestError, match=r"^temperature: .*y\.\.\. \(\d+ more characters\) \.\.\.y"
    ):
        llm.generate("x", SamplingParams(temperature="y" * 100_000))


def test_a_step_that_is_to_wait_for_no_time(llm):
    with pytest.raises(
        RequestError, match=r"^timeout: expected a number <= 1000000000, got 1e\+300"
    ):
        engine_of(llm).step(1e300)


def test_the_configuration(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^scheduler\.max_num_seqs: .*65536, got 1000000000 \(from"
    ):
        LLM(config={"scheduler": {"max_num_seqs": 10**9}})
    with pytest.raises(ConfigError, match=r"^engine\.watchdog_seconds: expected a number <= 1"):
        config_from({"engine": {"watchdog_seconds": 1e300}})
    with pytest.raises(
        ModelError, match=r"^model: 'm+\.\.\. .* cannot be opened: OSError: .* too long"
    ):
        LLM("m" * 100_000)
    with pytest.raises(ConfigError, match="^config: .* cannot be read: .*null"):
        LLM(config="\0")
    with pytest.raises(ConfigError, match="^value: expected plain data, got a dict that .* itself"):
        LLM(config=TABLE_CYCLE)
    with pytest.raises(ConfigError, match="^model: expected a string, got b'x'"):
        LLM(config={"model": b"x"})
    path = tmp_path / "model"
    config, _ = config_from({"model": path, "tokenizer": {"path": path}})
    assert (config.model, config.tokenizer.path) == (str(path), str(path))
    assert config_from(config)[0] == config
    assert isinstance(config, EngineConfig)
