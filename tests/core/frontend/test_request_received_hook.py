"""Requests that a hook has changed are checked before the engine gets them, wherever it runs."""

from __future__ import annotations

import msgspec
import pytest
from support.driving import run

from hardpoint import RequestError, SamplingParams
from hardpoint.plugins import EngineCoreRequest, ReasoningMarkers, hookimpl
from hardpoint.plugins.structured import StructuredOutputs

GREEDY = {"temperature": 0.0, "max_tokens": 20}


class Meddler:
    """Does what the test wants."""

    contract = 1
    does = staticmethod(lambda request: None)

    @hookimpl
    def request_received(self, request):
        type(self).does(request)


@pytest.fixture(scope="module")
def engine(meddled):
    return meddled


@pytest.fixture
def hook(monkeypatch):
    """Have the hook do something to each request."""
    return lambda does: monkeypatch.setattr(Meddler, "does", staticmethod(does))


def text_of(engine, prompt="say abc", **fields):
    params = SamplingParams(**{**GREEDY, **fields})
    return run(engine, [("r", prompt, params)])["r"][0][0][2]


def set_to(field, value):
    return lambda request: setattr(request, field, value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prompt_token_ids", [10**6], "expected token ids from 0 to 256, got 1000000"),
        ("prompt_token_ids", [], "expected at least one token, got none"),
        ("priority", "x", "expected a whole number, got a string"),
        ("priority", 2**70, "priority: int: can't serialize ints"),
        ("timeout", -1.0, "expected seconds > 0 or none, got -1.0"),
        ("params", {"n": 1}, "expected SamplingParams, got dict"),
        ("plugin_args", {"nobody": {}}, "no enabled plugin of that name takes arguments"),
        ("request_id", "mine", "for the frontend gives it and hooks may not change it, got 'mine'"),
        ("external_req_id", None, "expected 'r', for the frontend gives it"),
        ("child_index", 3, "expected 0, for the frontend gives it"),
        ("client_index", 1, "expected 0, for the frontend gives it"),
    ],
)
def test_what_no_engine_could_take_is_refused(engine, hook, field, value, words):
    hook(set_to(field, value))
    with pytest.raises(RequestError) as refused:
        engine.add_request("r", "say abc", SamplingParams(**GREEDY))
    assert str(refused.value).startswith("plugin 'meddler' (")
    assert "after its hook request_received: " in str(refused.value)
    assert field in str(refused.value) or field == "params"
    assert words in str(refused.value)
    assert not engine.has_unfinished_requests()
    hook(lambda request: None)
    assert text_of(engine) == " abc abc abc"


def test_the_engine_gets_what_the_hook_made(engine, hook):
    prompt = engine.parts.tokenizer.encode("say abc")
    hook(set_to("prompt_token_ids", tuple(prompt)))
    assert text_of(engine, "long") == " abc abc abc"


def test_a_hook_that_keeps_the_request_cannot_change_it_later(engine, hook):
    kept: list[EngineCoreRequest] = []
    hook(kept.append)
    engine.add_request("r", "say abc", SamplingParams(**GREEDY))
    kept[0].prompt_token_ids.clear()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].text == " abc abc abc"


def test_parameters_that_a_hook_sets_are_honoured(engine, hook):
    def only_a(request):
        request.params = msgspec.structs.replace(request.params, allowed_token_ids=[65])

    hook(only_a)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    assert run(engine, [("r", "say abc", params)])["r"][0][0][1] == [65, 65, 65]


def test_a_greedy_request_uses_no_processor_that_skips_it(engine, hook):
    used = []
    hook(lambda request: used.append(set(request.plugin_args)))
    text_of(engine, top_k=3)
    text_of(engine, temperature=0.5, top_k=3)
    assert used == [set(), {"temperature", "top_k"}]


def test_a_hook_that_ends_greedy_sampling_brings_the_processors_back(engine, hook):
    def draw(request):
        request.params = msgspec.structs.replace(request.params, temperature=100.0)

    hook(draw)
    assert text_of(engine, top_k=1) == " abc abc abc"


def test_an_answer_that_a_hook_asks_for_is_given(engine, hook):
    def answer_yes(request):
        structured = StructuredOutputs(choice=["yes"])
        request.params = msgspec.structs.replace(request.params, structured=structured)

    hook(answer_yes)
    assert text_of(engine) == "yes"
    hook(lambda request: setattr(request, "reasoning_markers", ReasoningMarkers(((999,),))))
    with pytest.raises(RequestError, match="reasoning_markers: expected token ids from 0 to 256"):
        text_of(engine)
    hook(lambda request: setattr(request, "reasoning_markers", ReasoningMarkers(((1,) * 65,))))
    with pytest.raises(RequestError, match="reasoning_markers: expected at most 64 tokens each"):
        text_of(engine)


def test_what_it_changes_of_the_arguments_themselves_stands(engine, hook):
    def of_two_the_second(request):
        request.params = msgspec.structs.replace(request.params, allowed_token_ids=[65])
        request.plugin_args["allowed_token_ids"] = {"allowed_token_ids": [66]}

    hook(of_two_the_second)
    hook(of_two_the_second)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    assert run(engine, [("r", "say abc", params)])["r"][0][0][1] == [66, 66, 66]


def test_what_a_ready_made_one_asks_for_by_its_parameters_alone_is_done(engine):
    params = SamplingParams(max_tokens=3, ignore_eos=True, allowed_token_ids=[65])
    request = EngineCoreRequest(request_id="x", prompt_token_ids=[5, 6], params=params)
    engine.add_request("mine", request)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == [65, 65, 65]
