"""Graceful ends of requests, by a `Finish` of a plugin."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from support.plugins.finishing import BUDGET

from hardpoint import LLM, RequestOutputKind, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model

HERE = "support.plugins.finishing"
KINDS = {
    "processor": f"{HERE}:TokenBudget",
    "observer": f"{HERE}:ObservedBudget",
    "part": f"{HERE}:PartBudget",
    "policy": f"{HERE}:PolicyBudget",
}
ENGINES: dict[str, dict[str, Any]] = {
    "step by step": {},
    "ahead": {"scheduler": {"asynchronous": True}},
    "with drafts": {
        "speculation": {"use": ["hardpoint.testing:ScriptedSpeculator"], "adaptive": False}
    },
    "with wrong drafts": {
        "speculation": {"use": ["hardpoint.testing:ScriptedSpeculator"], "adaptive": False},
        "plugin": {"scripted_speculator": {"right": 0.5}},
    },
    "in few blocks": {"max_model_len": 64, "kv_cache": {"num_blocks": 7}},
    "in a process": {"engine": {"in_process": False}},
}


PROMPTS = ["one", "another", "and a third"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("scripted"))


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _config(folder, kind: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    use = KINDS[kind]
    extra = copy.deepcopy(dict(engine))
    if kind == "policy":
        extra.setdefault("scheduler", {})["policy"] = use
    else:
        extra["plugins"] = {"enable": [use]}
    return scripted_config(folder, extra)


@pytest.fixture(scope="module")
def replies(folder):
    """Outputs without a budget, by the number of tokens."""
    with LLM(config=scripted_config(folder)) as llm:
        return [llm.generate(PROMPTS, _greedy(number)) for number in (BUDGET, 60)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_budget_ends_at_exactly_its_tokens(folder, replies, kind, engine) -> None:
    config, (expected, longer) = _config(folder, kind, ENGINES[engine]), replies
    if "speculation" in config:
        options = config.setdefault("plugin", {}).setdefault("scripted_speculator", {})
        pairs = [[output.prompt_token_ids, output.outputs[0].token_ids] for output in longer]
        options["replies"] = pairs
    with LLM(config=config) as llm:
        outputs = llm.generate(PROMPTS, _greedy(200))
        stats = llm.engines.scheduler_stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_accepted_drafts > 20 or "speculation" not in ENGINES[engine]
    assert stats.num_preemptions > 0 or engine != "in few blocks"
    for output, reference in zip(outputs, expected, strict=True):
        (completion,), (limit,) = output.outputs, reference.outputs
        assert (completion.token_ids, completion.text) == (limit.token_ids, limit.text)
        assert (completion.finish_reason, limit.finish_reason) == ("stop", "length")
        name = re.sub("([a-z])([A-Z])", r"\1_\2", KINDS[kind].partition(":")[2]).lower()
        more = {"stop_reason": BUDGET} if kind == "processor" else {}
        assert completion.stop_reason == {"plugin": name, "reason": "budget", **more}


def test_stream_ends_with_the_name_of_the_plugin(folder, replies) -> None:
    with LLM(config=_config(folder, "processor", {})) as llm:
        parts = [output.outputs[0] for output in llm.stream(PROMPTS[0], _greedy(200))]
    limit = replies[0][0].outputs[0]
    assert "".join(part.text for part in parts) == limit.text
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert parts[-1].stop_reason["plugin"] == "token_budget"


def test_stop_token_takes_precedence(folder, replies) -> None:
    tokens = replies[0][0].outputs[0].token_ids
    assert tokens[-1] not in tokens[:-1]
    params = msgspec.structs.replace(_greedy(200), stop_token_ids=[tokens[-1]])
    with LLM(config=_config(folder, "processor", {})) as llm:
        (output,) = llm.generate(PROMPTS[:1], params)
    assert output.outputs[0].stop_reason == tokens[-1]


@pytest.mark.parametrize("place", ["Gate", "Admission", "Start"])
def test_waiting_request_ends_without_tokens(folder, place) -> None:
    use = f"{HERE}:{place}End"
    extra = {"scheduler": {"policy": use}} if place == "Admission" else {}
    extra |= {} if extra else {"plugins": {"enable": [use]}}
    params = _greedy(5)
    with LLM(config=scripted_config(folder, extra)) as llm:
        outputs = llm.generate(["go", "stop here", "go on"], params)
    ends = [(o.outputs[0].finish_reason, len(o.outputs[0].token_ids)) for o in outputs]
    assert ends == [("length", 5), ("stop", 0), ("length", 5)]
    ended = outputs[1].outputs[0]
    assert ended.stop_reason == {"plugin": f"{place.lower()}_end", "reason": "prompt"}
    assert ended.error is None


def test_wrong_end_of_a_processor_fails_its_request(folder) -> None:
    config = scripted_config(folder, {"plugins": {"enable": [f"{HERE}:CountedEnd"]}})
    with LLM(config=config) as llm:
        (output,) = llm.generate(PROMPTS[:1], _greedy(3))
    assert output.outputs[0].finish_reason == "error"
    assert "its advance failed: Finish.num_tokens: expected None" in output.outputs[0].error


@pytest.mark.parametrize("stop", [[], ["nothing of it"]], ids=["no stop string", "stop string"])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_output_parser_ends_a_request(tmp_path, kind, stop) -> None:
    text = "one\ntwo, two\nthree\nfour"
    folder = write_scripted_model(tmp_path / "scripted", {"go": text * 3})
    use = {"plugins": {"enable": [f"{HERE}:SecondLine"]}}
    config = scripted_config(folder, use | {"reasoning": {"parser": "second_line"}})
    params = SamplingParams(temperature=0, max_tokens=60, stop=stop, output_kind=kind)
    with LLM(config=config) as llm:
        outputs = [output.outputs[0] for output in llm.stream("go", params)]
        stats = llm.engines.scheduler_stats()
    last = outputs[-1]
    joined = {
        name: "".join(getattr(o, name) or "" for o in outputs)
        if kind is RequestOutputKind.DELTA
        else getattr(last, name)
        for name in ("text", "content")
    }
    assert joined == dict.fromkeys(("text", "content"), "one\ntwo, two\n")
    assert last.finish_reason == "stop"
    assert last.stop_reason == {"plugin": "second_line", "reason": "lines", "stop_reason": 2}
    assert stats.num_running == 0
