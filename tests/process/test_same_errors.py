"""What a program catches does not depend on where the engine runs."""

from __future__ import annotations

import pytest
from harness import open_engine

from hardpoint import RequestError, SamplingParams
from hardpoint.core.frontend.input_processor import RequestExtras
from hardpoint.plugins import EngineCoreRequest
from hardpoint.testing import scripted_engine

HALF = "\ud800"  # of a pair
WORDS = r"expected text that UTF-8 can hold, got '\ud800' at character "
ENABLED = {"plugins": {"enable": ["faulty_plugins:Dense"]}}


@pytest.fixture(scope="module")
def inside(scripted):
    engine = scripted_engine(scripted, ENABLED)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def apart(scripted):
    engine = open_engine(scripted, ENABLED)
    yield engine
    engine.close()


@pytest.fixture(params=["inside", "apart"])
def engine(request):
    engine = request.getfixturevalue(request.param)
    yield engine
    assert not engine.has_unfinished_requests()
    engine.add_request("after", "say abc", SamplingParams(temperature=0.0))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs[0].text == " abc abc abc"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"request_id": f"r{HALF}"}, f"request_id: {WORDS}1"),
        ({"prompt": f"say {HALF}"}, f"prompt: {WORDS}4"),
        ({"prompt": {"prompt": HALF}}, f"prompt: {WORDS}0"),
        ({"extras": RequestExtras(cache_salt=f"é{HALF}")}, f"cache_salt: {WORDS}1"),
        ({"extras": RequestExtras(tags={"tenant": HALF})}, f"tags.tenant: {WORDS}0"),
        ({"extras": RequestExtras(tags={HALF: "x"})}, f"tags, a key: {WORDS}0"),
        ({"params": SamplingParams(stop=f"a{HALF}")}, f"stop: {WORDS}1"),
        ({"params": SamplingParams(stop=["a", HALF])}, f"stop[1]: {WORDS}0"),
        ({"params": SamplingParams(bad_words=[HALF])}, f"bad_words[0]: {WORDS}0"),
        (
            {"params": SamplingParams(plugin_args={"dense": {"how": HALF}})},
            f"plugin_args.dense.how: {WORDS}0",
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_text_that_utf_8_cannot_hold(engine, fields, words):
    given = {"request_id": "r", "prompt": "x"} | fields
    with pytest.raises(RequestError) as error:
        engine.add_request(**given)
    assert str(error.value) == words


def test_text_beyond_ascii_is_well(engine):
    extras = RequestExtras(cache_salt="é", tags={"ключ": "值"})
    engine.add_request("😀", "😀", SamplingParams(max_tokens=1, stop=["é"]), extras)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].request_id == "😀"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"tags": {"tenant": HALF}}, "tags.tenant"),
        ({"cache_salt": HALF}, "cache_salt"),
        ({"params": SamplingParams(stop=[HALF])}, "stop[0]"),
        ({"trace_headers": {"traceparent": HALF}}, "trace_headers.traceparent"),
        ({"plugin_args": {"dense": {"how": [HALF]}}}, "plugin_args.dense.how[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_requests_made_elsewhere(engine, fields, path):
    right = {"request_id": "r", "prompt_token_ids": [1], "params": SamplingParams()}
    with pytest.raises(RequestError) as error:
        engine.add_request("r", EngineCoreRequest(**right | fields))
    assert str(error.value) == f"{path}: {WORDS}0"


def test_a_wrong_object_is_named_by_its_path(engine):
    extras = RequestExtras(tags={"ok": "x", "tenant": object()})
    with pytest.raises(RequestError, match=r"^tags\.tenant: expected plain data: a builtins\.obj"):
        engine.add_request("r", "x", None, extras)
    params = SamplingParams(plugin_args={"dense": {"how": ["x", object()]}})
    with pytest.raises(RequestError, match=r"^plugin_args\.dense\.how\[1\]: expected plain data: "):
        engine.add_request("r", "x", params)
