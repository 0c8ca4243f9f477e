"""The work for a body is at most linear in its size, wherever it is large."""

import contextlib
import json
import sys
import time

import msgspec
import pytest
from support.body_costs import BODIES, large_bodies, parse_seconds
from support.fake_engine import FakeEngine, configured
from support.http_server import running
from support.scripted_server import scripted_server
from support.source_tree import without_collections

from hardpoint.builtin_plugins.server.config import ServerLimits
from hardpoint.builtin_plugins.server.requests.bodies import convert_body, decode_object
from hardpoint.errors import HardpointError
from hardpoint.plugins.server import Client
from hardpoint.typed import suggest
from hardpoint.typed.msgspec_errors import parse_error

LIMITS = ServerLimits()
PATHS = sorted(BODIES)
MOST = 8 << 20


@pytest.fixture(scope="module")
def routes():
    with running(FakeEngine(config=configured())) as server:
        yield {r.path: r.request_type for r in server.service.routes if r.request_type is not None}


def calls_for(data, type_):
    """Return how many functions are called to check a body, without finalizers of others."""
    count = 0

    def noting(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    with without_collections():
        sys.setprofile(noting)
        try:
            with contextlib.suppress(HardpointError):
                convert_body(decode_object(data, LIMITS), type_, lenient=False)
        finally:
            sys.setprofile(None)
    return count


def test_all_routes_that_take_bodies_are_here(routes):
    assert {path for path in routes if "{" not in path} == set(BODIES)


@pytest.mark.parametrize("path", PATHS)
def test_twice_the_size_needs_at_most_twice_the_calls(routes, path):
    type_ = routes[path]
    is_all = path == "/tokenize"  # which has messages and tools
    small, large = (dict(large_bodies(path, type_, n, inner=is_all)) for n in (600, 1200))
    for kind in small:
        calls = [calls_for(bodies[kind], type_) for bodies in (small, large)]
        assert calls[1] <= 2.3 * calls[0] + 50, (kind, calls)


@pytest.mark.parametrize("value", ["text", 1, None])
def test_items_of_a_wrong_type_need_few_calls(routes, value):
    data = json.dumps({"items": [value] * 20_000}).encode()
    assert calls_for(data, routes["/v1/conversations"]) < 12 * 20_000


@pytest.mark.parametrize("name", ["f" * 1000, "model" * 1000, "prompt" + " " * 1000])
def test_long_names_are_close_to_none(monkeypatch, name):
    monkeypatch.setattr("difflib.get_close_matches", lambda *_, **__: pytest.fail("it looks"))
    assert suggest(name, ["model", "prompt"]) == ""


@pytest.mark.parametrize("quoted", ["a - at `$.b`", " - at `", "`key` in `$", "$" * 9, "[...]"])
def test_the_path_of_an_error_is_its_end(quoted):
    class Inner(msgspec.Struct, tag_field="kind", tag="x"):
        pass

    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert({"a": [{"kind": quoted}]}, dict[str, list[Inner]])
    text, steps, in_key = parse_error(str(raised.value))
    assert (steps, in_key) == (["[...]", "[0]", "kind"], False)
    assert text == f"Invalid value '{quoted}'"


@pytest.mark.nightly
@pytest.mark.parametrize("path", PATHS)
def test_the_processor_time_is_a_multiple_of_that_of_json(tmp_path, routes, path):
    size = MOST - 1000
    with scripted_server(tmp_path) as server:
        for kind, data in large_bodies(path, routes[path], size, inner=False):
            parsed = parse_seconds(kind.partition(" at ")[0], size)
            begun = time.process_time()
            answer = server.call(server.users.ask, Client(name="alice"), path, data)
            used = time.process_time() - begun
            assert answer.status_code < 500, (kind, answer.body[:200])
            assert len(answer.body) < 5000 or answer.status_code == 200, kind
            # A collection of all garbage, which any allocation may cause, is in the addend.
            assert used <= 30 * parsed + 0.5, (kind, used, parsed)
