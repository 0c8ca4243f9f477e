"""Who a request is: the user's id outside, one of its own inside."""

from __future__ import annotations

import logging
import re

import pytest
from support.internals import input_processor_of, keeps_nothing, output_processor_of

from hardpoint import LLM, RequestError, RequestOutputKind, SamplingParams
from hardpoint.core.frontend.outputs.request_state import ParentRequest
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.plugins import EngineCoreRequest, hookimpl
from hardpoint.testing import scripted_config, scripted_engine

GREEDY = SamplingParams(
    temperature=0.0, max_tokens=12, output_kind=RequestOutputKind.FINAL_ONLY, ignore_eos=True
)
INTERNAL = re.compile(r"^(.*)-[0-9a-f]{8}$")


class Seen:
    """Keeps the ids of the requests that come by."""

    contract = 1
    requests: list[EngineCoreRequest] = []

    @hookimpl
    def request_received(self, request):
        self.requests.append(request)


@pytest.fixture(scope="module")
def engine(scripted):
    engine = scripted_engine(scripted, {"plugins": {"enable": [f"{__name__}:Seen"]}})
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _nothing_left(engine):
    Seen.requests.clear()
    yield
    kept = output_processor_of(engine)
    assert keeps_nothing(kept)


def finish(engine) -> list:
    finals = []
    while engine.has_unfinished_requests():
        finals += [output for output in engine.step() if output.finished]
    return finals


def test_inside_it_has_an_id_of_its_own(engine):
    internal = engine.add_request("mine", "say abc", GREEDY)
    assert INTERNAL.match(internal)[1] == "mine"
    (request,) = Seen.requests
    assert (request.request_id, request.external_req_id) == (internal, "mine")
    (output,) = finish(engine)
    assert output.request_id == "mine"


def test_completions_have_one_each(engine):
    many = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=4)
    internal = engine.add_request("mine", "x", many)
    assert [r.request_id for r in Seen.requests] == [f"{i}_{internal}" for i in range(3)]
    assert {r.external_req_id for r in Seen.requests} == {"mine"}
    assert {o.request_id for o in finish(engine)} == {"mine"}


def test_two_live_requests_with_one_id_are_kept_apart(engine):
    ids = [engine.add_request("twin", prompt, GREEDY) for prompt in ("say abc", "long")]
    assert len(set(ids)) == 2
    outputs = finish(engine)
    assert [output.request_id for output in outputs] == ["twin", "twin"]
    assert {output.prompt: output.outputs[0].text[:4] for output in outputs} == {
        "say abc": " abc",
        "long": "0123",
    }


@pytest.mark.parametrize("n", [1, 3])
def test_abort_by_the_users_id_ends_all_that_have_it(engine, n):
    params = SamplingParams(n=n, temperature=1.0, seed=1, max_tokens=50, ignore_eos=True)
    for name in ("twin", "twin", "other"):
        engine.add_request(name, "x", params)
    engine.step()
    engine.abort_requests(["twin"])
    assert {output.request_id for output in finish(engine)} == {"other"}


@pytest.mark.parametrize("n", [1, 3])
def test_abort_by_the_internal_id_ends_that_one(engine, n):
    params = SamplingParams(n=n, temperature=1.0, seed=1, max_tokens=9, ignore_eos=True)
    first, _ = (engine.add_request("twin", prompt, params) for prompt in ("a", "b"))
    engine.step()
    engine.abort_requests([first])
    assert {output.prompt for output in finish(engine)} == {"b"}


def test_abort_by_the_id_of_a_completion_ends_its_prompt(engine):
    internal = engine.add_request("r", "x", SamplingParams(n=2, max_tokens=50, ignore_eos=True))
    engine.abort_requests([f"1_{internal}", "never seen"])
    assert not engine.has_unfinished_requests()


def test_why_waiting_takes_either(engine):
    internal = engine.add_request("r", "x", GREEDY)
    engine.step()
    assert engine.why_waiting("r") == engine.why_waiting(internal) == {0: None}
    engine.abort_requests([internal])
    with pytest.raises(RequestError, match="request_id: 'r' is not a live request"):
        engine.why_waiting("r")


def test_ids_that_look_like_others_harm_nobody(engine):
    internal = engine.add_request("r", "say abc", GREEDY)
    engine.add_request(internal, "long", GREEDY)  # a user's id may be anybody's internal one
    engine.add_request(f"0_{internal}", "emoji", GREEDY)
    assert sorted(output.prompt for output in finish(engine)) == ["emoji", "long", "say abc"]


class TestReadyMade:
    def request(self, engine, **fields) -> EngineCoreRequest:
        request, _, _ = input_processor_of(engine).process("x", "say abc", GREEDY)
        for name, value in fields.items():
            setattr(request, name, value)
        return request

    def test_it_is_taken_as_it_is(self, engine):
        request = self.request(engine)
        internal = engine.add_request("mine", request)
        assert (request.request_id, request.external_req_id) == ("x", None)  # the caller's own
        assert INTERNAL.match(internal)[1] == "mine"
        (output,) = finish(engine)
        assert (output.request_id, output.prompt) == ("mine", None)
        assert output.outputs[0].text.startswith(" abc abc abc")

    def test_one_that_has_a_users_id_already_is_refused(self, engine):
        request = self.request(engine, external_req_id="theirs")
        with pytest.raises(
            RequestError, match="external_req_id: expected None, for the frontend gives it, got 'th"
        ):
            engine.add_request("mine", request)

    def test_its_own_parameters_are_the_only_ones(self, engine):
        request = self.request(engine)
        for more in ({"params": GREEDY}, {"extras": RequestExtras(priority=3)}):
            with pytest.raises(RequestError, match="sampling_params: a ready-made EngineCoreReq"):
                engine.add_request("mine", request, **more)


class TestWithoutRandomIds:
    @pytest.fixture
    def plain(self, scripted):
        engine = scripted_engine(scripted, {"engine": {"random_request_ids": False}})
        yield engine
        engine.close()

    def test_the_users_id_is_the_only_one(self, plain):
        assert plain.add_request("r", "x", GREEDY) == "r"
        with pytest.raises(RequestError, match="request_id: 'r' is the id of a live request, or o"):
            plain.add_request("r", "x", GREEDY)
        finish(plain)
        assert plain.add_request("r", "x", GREEDY) == "r"
        finish(plain)

    @pytest.mark.parametrize("taken", ["0_r", "1_r"])
    def test_completions_do_not_clash_either(self, plain, taken):
        many = SamplingParams(n=2, max_tokens=3)
        plain.add_request(taken, "x", GREEDY)
        with pytest.raises(RequestError, match="request_id: 'r' is the id of a live request, or o"):
            plain.add_request("r", "x", many)
        finish(plain)
        plain.add_request("r", "x", many)
        with pytest.raises(RequestError, match=f"request_id: '{taken}' is the id of a live requ"):
            plain.add_request(taken, "x", GREEDY)
        finish(plain)

    def test_it_is_logged_once(self, scripted, caplog):
        config = scripted_config(scripted, {"engine": {"random_request_ids": False}})
        with caplog.at_level(logging.WARNING, "hardpoint"), LLM(config=config) as llm:
            llm.generate(["x"] * 3, GREEDY)
        words = [r.getMessage() for r in caplog.records if "random_request_ids" in r.getMessage()]
        assert words == ["engine.random_request_ids is off: two live requests cannot share an id"]


def test_llm_numbers_from_zero_and_goes_on(scripted):
    with LLM(config=scripted_config(scripted)) as llm:
        ids = [output.request_id for _ in range(2) for output in llm.generate(["x"] * 6, GREEDY)]
    assert ids == [str(number) for number in range(12)]


def test_children_share_nothing_that_a_hook_may_change():
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        params=SamplingParams(n=2),
        plugin_args={"p": {"a": [1]}},
        tags={"tenant": "acme"},
        trace_headers={"traceparent": "00"},
        kv_transfer_params={"remote": [1]},
    )
    first, second = ParentRequest("r", "r-1", 2).children(request)
    first.prompt_token_ids.append(3)
    first.plugin_args["p"]["a"].append(2)
    first.tags["tenant"] = first.trace_headers["traceparent"] = "changed"
    first.kv_transfer_params["remote"].append(2)
    assert second.tags == {"tenant": "acme"}
    assert second.trace_headers == {"traceparent": "00"}
    assert second.kv_transfer_params == {"remote": [1]}
    assert second.prompt_token_ids == [1, 2]
    assert second.plugin_args == {"p": {"a": [1]}}
    assert (first.child_index, second.child_index) == (0, 1)
