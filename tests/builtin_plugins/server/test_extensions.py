"""Extensions of a server by plugins: order, conflicts, and the responsible plugin of a fault."""

import asyncio
import contextlib
import re
import sys
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, StreamingResponse
from support.fake_engine import FakeEngine, HeldEngine, configured
from support.http_server import running
from support.waiting import wait_until

from hardpoint import ConfigError, PluginError, RequestError, SamplingParams
from hardpoint.builtin_plugins.server import timing
from hardpoint.errors import PluginConflictError, PluginContractError, PluginFaultError
from hardpoint.plugins import Annotated, Meta, hookimpl
from hardpoint.plugins.component.manifest import Manifest, PluginEntry
from hardpoint.plugins.config_tables import PluginsConfig
from hardpoint.plugins.server import (
    Authenticator,
    Client,
    InstalledExtension,
    Middleware,
    Route,
    Transform,
)
from hardpoint.testing import ScriptedClock
from hardpoint.typed import Strict

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


class Count(Strict):
    """A body."""

    words: list[str]
    top: Annotated[int, Meta(ge=1)] = 1


class Counted(Strict):
    """An answer."""

    client: str
    counts: dict[str, int]


class Acme:
    """Adds the extensions of a test; `context` is the server's."""

    contract = 1

    def __init__(self, *extensions):
        self.extensions = extensions

    @hookimpl
    def server_extensions(self, server):
        self.context = server
        return [e(self) if callable(e) else e for e in self.extensions]


def serving(*extensions, **server):
    """Run a server with a plugin; without extensions with `FakeEngine.extensions`."""
    return running(FakeEngine(config=configured(**server), hooks=(Acme(*extensions),)))


def installed(*pairs, **server):
    """Run a server with (plugin, extension) pairs."""
    return running(FakeEngine(config=configured(**server), extensions=pairs))


def blames(response, plugin, text):
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (500, "plugin_error")
    assert f"plugin {plugin!r}" in error["message"]
    assert text in error["message"]
    assert response.headers["x-should-retry"] == "false"
    return True


def faults(server):
    return server.client.get("/health").json().get("faults", {})


# Routes


async def count(request):
    return PlainTextResponse("ok")


def route(path="/acme", endpoint=count, **kwargs):
    return Route(path=path, endpoint=endpoint, **kwargs)


def test_a_route_reads_its_body_with_the_servers_limits_and_messages():
    def extension(plugin):
        async def endpoint(request):
            body = await plugin.context.read(request, Count)
            counts = {word: body.words.count(word) for word in body.words}
            return Counted(client=request.state.client.name, counts=counts)

        return Route(path="/acme/count", endpoint=endpoint, methods=["POST"])

    with serving(extension, limits={"body_bytes": 200}) as server:

        def answer(body=None, **kwargs):
            response = server.client.post("/acme/count", json=body, **kwargs)
            return response.status_code, response.json()

        assert answer({"words": ["a", "b", "a"], "top": None}) == (
            200,
            {"client": "anybody", "counts": {"a": 2, "b": 1}},
        )
        for body, param, words in [
            ({"words": "a"}, "words", "expected a list"),
            ({"words": [], "top": 0}, "top", "expected a whole number >= 1, got 0"),
            ({"words": [], "tops": 1}, "tops", "unknown field (did you mean 'top'?)"),
            ([], "body", "expected a JSON object, got an array"),
        ]:
            status, answered = answer(body)
            assert (status, answered["error"]["param"]) == (400, param)
            assert words in answered["error"]["message"]
        headers = {"content-type": "application/json"}
        assert answer(content="{", headers=headers)[1]["error"]["message"].startswith("body: exp")
        assert answer({"words": ["x" * 200]})[0] == 413
        assert faults(server) == {}


def test_a_route_generates_with_the_engine_and_ends_when_its_client_goes():
    def extension(plugin):
        async def endpoint(request):
            return PlainTextResponse(
                await plugin.context.while_connected(request, generated(plugin.context.engine))
            )

        return route(endpoint=endpoint)

    async def generated(engine):
        async with contextlib.aclosing(engine.generate("x", SamplingParams())) as outputs:
            return "".join([o.outputs[0].text async for o in outputs])

    with serving(extension) as server:
        assert server.client.get("/acme").text == "Hello there , friend"
        server.engine.delay = 3600.0
        connection = server.socket()
        connection.sendall(b"GET /acme HTTP/1.1\r\nhost: localhost\r\n\r\n")
        wait_until(lambda: server.engine.open == 1)
        connection.close()
        wait_until(lambda: server.engine.open == 0)
        assert faults(server) == {}


def test_paths_have_parameters_and_methods():
    async def name(request):
        return PlainTextResponse(f"{request.path_params['name']} {request.method}")

    async def number(request):
        return PlainTextResponse(repr(request.path_params["n"] + 1))

    extensions = route("/users/{name}", name), route("/numbers/{n:int}", number, methods=["PUT"])
    with serving(*extensions) as server:
        assert server.client.get("/users/ann").text == "ann GET"
        assert server.client.put("/numbers/4").text == "5"
        assert server.client.put("/numbers/x").status_code == 404
        head = server.client.head("/users/ann")
        assert (head.status_code, head.content) == (200, b"")
        for method in ("OPTIONS", "POST"):
            refused = server.client.request(method, "/users/ann")
            assert refused.status_code == 405
            assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}
        assert server.client.get(CHAT).json()["error"]["type"] == "invalid_request_error"


def raising(error):
    async def endpoint(request):
        raise error

    return endpoint


def returning(value):
    async def endpoint(request):
        return value

    return endpoint


class NotJSON(Strict):
    """Holds values that JSON does not have."""

    thing: object


async def cut(request):
    async def parts():
        yield b"begun"
        raise ValueError("later")

    return StreamingResponse(parts())


FAILING_ROUTES = [
    (raising(ValueError("secret")), "failed: ValueError"),
    (raising(SystemExit(1)), "failed: SystemExit"),
    (raising(KeyboardInterrupt()), "failed: KeyboardInterrupt"),
    (raising(HTTPException(200)), "failed: HTTPException"),
    (raising(asyncio.CancelledError()), "failed: CancelledError"),
    (raising(ConfigError("secret")), "failed: ConfigError"),
    (returning(None), "failed: it returned a NoneType, expected a Response or a struct"),
    (returning({"a": 1}), "failed: it returned a dict, expected a Response or a struct"),
    (returning(NotJSON(thing=object())), "failed: TypeError"),
]


def test_a_fault_of_a_route_ends_that_request_alone():
    routes = [route(f"/acme/{i}", endpoint) for i, (endpoint, _) in enumerate(FAILING_ROUTES)]
    with serving(*routes) as server:
        for i, (_, text) in enumerate(FAILING_ROUTES):
            response = server.client.get(f"/acme/{i}")
            assert blames(response, "acme", f"its route /acme/{i} {text}")
            assert "secret" not in response.text
        assert server.post(CHAT, ASK).status_code == 200
        assert faults(server) == {"acme": len(FAILING_ROUTES)}


def test_what_would_end_the_event_loop_ends_the_request():
    def exiting(acme):
        async def work():
            raise KeyboardInterrupt

        async def endpoint(request):
            return await acme.context.while_connected(request, work())

        return route(endpoint=endpoint)

    with serving(exiting) as server:
        text = "its route /acme failed: KeyboardInterrupt"
        assert blames(server.client.get("/acme"), "acme", text)
        assert faults(server) == {"acme": 1}


def test_a_client_is_not_told_where_the_configuration_names_the_plugin():
    source = (
        "plugin 'acme' (acme 1.0, acme:X), asked for by plugins.enable[1] (file /home/u/h.toml)"
    )
    owned = InstalledExtension("acme", source, route(endpoint=raising(ValueError())))
    engine = FakeEngine(config=configured())
    engine.server_extensions = lambda context: [owned]
    with running(engine) as server:
        error = server.client.get("/acme").json()["error"]
    expected = "plugin 'acme' (acme 1.0, acme:X): its route /acme failed: ValueError"
    assert error["message"] == expected


@pytest.fixture
def clock(monkeypatch):
    """The clock that measures how long extensions block the event loop."""
    scripted = ScriptedClock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=scripted))
    return scripted


def blocking(clock):
    """Return an endpoint that takes 0.3 s without giving others a turn."""

    async def endpoint(request):
        clock.advance(0.3)
        return PlainTextResponse("late")

    return endpoint


def test_a_route_that_blocks_the_server_is_named(caplog, clock):
    fine = route("/fine")
    engine = FakeEngine(config=configured(), hooks=(Acme(route(endpoint=blocking(clock)), fine),))
    engine.config = msgspec.structs.replace(engine.config, plugins=PluginsConfig(slow_seconds=0.1))
    with running(engine) as server:
        for _ in range(2):
            assert server.client.get("/acme").text == "late"
            assert server.client.get("/fine").text == "ok"
        slow = server.client.get("/health").json()["slow"]
    (record,) = caplog.records
    text = r"its route /acme blocked the server for 0\.3 s, in which it answered no other request"
    assert re.search(text + "; hand long work to asyncio.to_thread", record.message)
    assert re.match(r"plugin 'acme' \(acme 1.0, acme:acme\)", record.message)
    assert re.search(text, slow["acme"])


def test_a_route_that_blocks_behind_a_middleware_is_named_alone(caplog, clock):
    async def passes_on(app, scope, receive, send):
        await app(scope, receive, send)

    pairs = [("outer", middleware(passes_on)), ("acme", route(endpoint=blocking(clock)))]
    engine = FakeEngine(config=configured(), extensions=tuple(pairs))
    engine.config = msgspec.structs.replace(engine.config, plugins=PluginsConfig(slow_seconds=0.1))
    with running(engine) as server:
        assert server.client.get("/acme").text == "late"
    (record,) = caplog.records
    assert "'acme'" in record.message


def waiting(acme):
    async def endpoint(request):
        await asyncio.Event().wait()

    return route("/acme", endpoint)


def working(acme):
    async def work():
        await asyncio.sleep(0.3)
        return PlainTextResponse("done")

    async def endpoint(request):
        return await acme.context.while_connected(request, work())

    return route("/long", endpoint)


async def streams(request):
    async def parts():
        for part in ("a", "b"):
            yield part
            await asyncio.sleep(0.3)

    return StreamingResponse(parts())


def test_a_route_that_waits_for_ever_is_ended():
    limited = (waiting, working, route("/stream", streams))
    with serving(*limited, extension_seconds=0.2) as server:
        text = "its route /acme failed: it took more than 0.2 s (server.extension_seconds)"
        assert blames(server.client.get("/acme"), "acme", text)
        assert server.client.get("/long").text == "done"
        assert server.client.get("/stream").text == "ab"
        assert faults(server) == {"acme": 1}


REFUSING_ROUTES = [
    (RequestError("words[3]: too long"), 400, "words[3]: too long"),
    (HTTPException(404, "there is no such user"), 404, "there is no such user"),
    (HTTPException(429, "later", {"retry-after": "7"}), 429, "later"),
]


def test_a_route_may_refuse_a_request():
    routes = [route(f"/acme/{status}", raising(error)) for error, status, _ in REFUSING_ROUTES]
    with serving(*routes) as server:
        for _, status, text in REFUSING_ROUTES:
            response = server.client.get(f"/acme/{status}")
            assert (response.status_code, response.json()["error"]["message"]) == (status, text)
            assert response.headers.get("retry-after") == ("7" if status == 429 else None)
        assert faults(server) == {}


def test_a_route_that_fails_after_its_beginning_ends_the_connection():
    with serving(route(endpoint=cut)) as server:
        with pytest.raises(httpx.TransportError):
            server.client.get("/acme")
        assert faults(server) == {"acme": 1}
        assert server.post(CHAT, ASK).status_code == 200


def test_a_plugin_replaces_a_route_only_if_the_configuration_allows_it():
    replacement = route("/version", returning(PlainTextResponse("mine")))
    with pytest.raises(PluginConflictError, match=r"its route /version is the server's own /versi"):
        serving(replacement).__enter__()
    with serving(replacement, replace_routes=["/version"]) as server:
        assert server.client.get("/version").text == "mine"
        assert "faults" not in server.client.get("/health").json()


@pytest.mark.parametrize(
    ("routes", "error", "text"),
    [
        ([("a", route("/v1/models/mine"))], PluginConflictError, r"own /v1/models/\{model:path\}"),
        ([("a", route("/x/{a}")), ("b", route("/x/{b}"))], PluginConflictError, "added twice: by"),
        ([("a", route("/x")), ("a", route("/x"))], PluginConflictError, "GET /x is added twice"),
    ],
)
def test_conflicts_of_routes_keep_the_server_from_starting(routes, error, text):
    with pytest.raises(error, match=text):
        installed(*routes).__enter__()


def test_a_route_that_matches_everything_hides_no_other():
    with serving(route("/{rest:path}")) as server:
        assert server.client.get("/version").json() == {"version": "9.9"}
        assert server.client.get("/anything/else").text == "ok"


def test_replace_routes_lists_routes_that_there_are():
    with pytest.raises(ConfigError, match=r"expected paths of the server's own routes, got '/non"):
        serving(replace_routes=["/none"]).__enter__()


# What the loader refuses


def plain(*_):
    """No coroutine."""


async def later(*_):
    """A coroutine."""


@pytest.mark.parametrize(
    ("extension", "text"),
    [
        (route("acme"), "Route 'acme': path: expected one that begins with /"),
        (route("/a/{b}/{b}"), "path: Duplicated param name b"),
        (route("/a/{b:money}"), "path: Unknown path convertor 'money'"),
        (route(endpoint=plain), "endpoint: expected an `async def`, got a plain function"),
        (route(endpoint="x"), "endpoint: expected an `async def`, got 'x'"),
        (route(methods="GET"), "methods: expected some of GET, HEAD"),
        (route(methods=["FETCH"]), "methods: expected some of GET"),
        (route(request_type=dict), "request_type: expected a class that derives from"),
        (Middleware(wrap=3), "Middleware: wrap: expected a function of an application, got 3"),
        (Middleware(wrap=plain, before="other"), "before: expected a list of names of plugins"),
        (Transform(), "Transform: it has none of request, response, event and end"),
        (Transform(request=plain), "request: expected an `async def`, got a plain function"),
        (Transform(event=later), "event: expected a plain function, got an `async def`"),
        (Authenticator(authenticate=plain), "authenticate: expected an `async def`"),
    ],
)
def test_a_malformed_extension_keeps_the_server_from_starting(extension, text):
    hook = Acme()
    hook.extensions = [lambda plugin: extension]
    with pytest.raises(PluginContractError) as caught:
        running(FakeEngine(config=configured(), hooks=(hook,))).__enter__()
    assert str(caught.value).startswith("plugin 'acme' (acme 1.0, acme:acme")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("wrap", "error", "text"),
    [
        (lambda app: 1 / 0, PluginFaultError, "its middleware cannot be built: ZeroDivisionError"),
        (lambda app: None, ConfigError, "must return an application, got a NoneType"),
    ],
)
def test_a_middleware_is_built_before_the_first_request(wrap, error, text):
    with pytest.raises(error, match=text):
        serving(Middleware(wrap=wrap)).__enter__()


# Order


def noting(name, **order):
    def wrap(app):
        async def middleware(scope, receive, send):
            scope["state"].setdefault("seen", []).append(name)
            await app(scope, receive, send)

        return middleware

    return name, Middleware(wrap=wrap, **order)


@pytest.mark.parametrize(
    ("plugins", "order"),
    [
        ([noting("a"), noting("b"), noting("c")], "abc"),
        ([noting("a"), noting("b", before=["a"]), noting("c")], "bac"),
        ([noting("a", after=["c", "absent"]), noting("b"), noting("c")], "bca"),
    ],
)
def test_middleware_runs_in_order(plugins, order):
    async def seen(request):
        return PlainTextResponse("".join(request.state.seen))

    with installed(*plugins, ("r", route("/seen", seen))) as server:
        assert server.client.get("/seen").text == order


def test_an_order_that_cannot_be_met_keeps_the_server_from_starting():
    plugins = noting("a", before=["b"]), noting("b", before=["a"])
    with pytest.raises(PluginError, match=r"before and after of Middleware make a cycle: a -> b"):
        installed(*plugins).__enter__()


# Middleware


def middleware(function):
    """Return an extension with the middleware `function(app, scope, receive, send)`."""

    def wrap(app):
        async def wrapped(scope, receive, send):
            if scope["path"] == "/version":
                return await app(scope, receive, send)
            return await function(app, scope, receive, send)

        return wrapped

    return Middleware(wrap=wrap)


OK = {"type": "http.response.start", "status": 200, "headers": []}
END = {"type": "http.response.body", "body": b"", "more_body": False}


async def raises_before(app, scope, receive, send):
    raise ValueError("secret")


async def swallows(app, scope, receive, send):
    """Answer nothing."""


async def answers_twice(app, scope, receive, send):
    async def twice(message):
        await send(message)
        if message["type"] == "http.response.start":
            await send(message)

    await app(scope, receive, twice)


async def begins_with_a_body(app, scope, receive, send):
    await send(END)


async def hangs(app, scope, receive, send):
    await asyncio.sleep(3600)


async def exits(app, scope, receive, send):
    sys.exit("bye")


FAILING_MIDDLEWARE = {
    raises_before: "its middleware failed: ValueError",
    swallows: "its middleware failed: it ended without an answer",
    begins_with_a_body: "its middleware failed: it sent a body before the start",
    hangs: "its middleware failed: it took more than 0.2 s (server.extension_seconds)",
    exits: "its middleware failed: SystemExit",
}


async def as_asked(app, scope, receive, send):
    """Run the case of the header x-case."""
    function = globals()[dict(scope["headers"])[b"x-case"].decode()]
    await function(app, scope, receive, send)


def test_a_fault_of_a_middleware_ends_that_request_alone():
    bad = ("bad", middleware(as_asked))
    with installed(noting("outer"), bad, extension_seconds=0.2) as server:
        for function, text in FAILING_MIDDLEWARE.items():
            response = server.post(CHAT, ASK, headers={"x-case": function.__name__})
            assert blames(response, "bad", text)
            assert server.client.get("/version").status_code == 200
        assert faults(server) == {"bad": len(FAILING_MIDDLEWARE)}


async def raises_after_the_start(app, scope, receive, send):
    await send(OK)
    raise ValueError("later")


async def leaves_unfinished(app, scope, receive, send):
    await send(OK)


def test_a_middleware_that_fails_after_the_start_ends_the_connection():
    cases = (raises_after_the_start, answers_twice, leaves_unfinished)
    with installed(noting("outer"), ("bad", middleware(as_asked))) as server:
        for function in cases:
            with pytest.raises(httpx.TransportError):
                server.post(CHAT, ASK, headers={"x-case": function.__name__})
            assert server.client.get("/version").status_code == 200
        assert faults(server) == {"bad": len(cases)}


def test_probes_pass_no_middleware():
    async def fails(app, scope, receive, send):
        raise ValueError("x")

    async def own(request):
        return PlainTextResponse("own")

    bad = ("bad", middleware(fails))
    with installed(bad) as server:
        assert server.client.get("/health").json() == {"status": "ok"}
        assert server.client.get("/ready").status_code == 200
        assert blames(server.client.get("/v1/models"), "bad", "its middleware failed: ValueError")
    route = ("acme", Route(path="/health", endpoint=own))
    with installed(bad, route, replace_routes=["/health"]) as server:
        assert blames(server.client.get("/health"), "bad", "its middleware failed: ValueError")


class Raw:
    """An answer with a start as it is given."""

    def __init__(self, **start):
        self.start = start

    async def __call__(self, scope, receive, send):
        await send({"type": "http.response.start", **self.start})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ({"status": 700}, "it answered with the status 700, expected 200 to 599"),
        ({"status": 99}, "the status 99, expected 200 to 599"),
        ({"status": "200"}, "the status '200', expected 200 to 599"),
        ({"status": 200, "headers": [(b"x y", b"1")]}, "a header that HTTP cannot carry, b'x y'"),
        ({"status": 200, "headers": [(b"x", b"1\r\na: b")]}, "a header that HTTP cannot carry"),
        ({"status": 200, "headers": [("x", "1")]}, "headers that are no pairs of bytes"),
        ({"status": 200, "headers": [(b"content-length", b"zz")]}, "content-length that is no"),
    ],
)
def test_what_http_cannot_carry_is_the_fault_of_the_plugin(start, text):
    async def answers(app, scope, receive, send):
        await Raw(**start)(scope, receive, send)

    with installed(("bad", middleware(answers))) as server:
        answer = server.client.get("/v1/models")
        assert blames(answer, "bad", text)
        assert answer.headers["x-request-id"]
        assert faults(server) == {"bad": 1}


def test_an_answer_needs_no_headers():
    async def answers(app, scope, receive, send):
        await Raw(status=200)(scope, receive, send)

    async def iterates(app, scope, receive, send):
        await Raw(status=200, headers=iter([(b"x-a", b"1")]))(scope, receive, send)

    with installed(("fine", middleware(answers))) as server:
        assert server.client.get("/v1/models").text == "ok"
    with installed(("fine", middleware(iterates))) as server:
        assert server.client.get("/v1/models").headers["x-a"] == "1"


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        (HTTPException(700, "x"), "the status 700, expected 200 to 599"),
        (HTTPException(400, "x", {"x-a": "b\nc"}), "a header that HTTP cannot carry, b'x-a'"),
        (HTTPException(400, "x", {"x-a": 5}), "it refused with headers that are no texts"),
        (HTTPException(400, "x", {"x-a": "\u20ac"}), "it refused with headers that are no texts"),
        (HTTPException(400, "\ud800"), "it refused with a message that is no Unicode"),
    ],
)
def test_a_refusal_that_http_cannot_carry_is_the_fault_of_the_plugin(refusal, text):
    async def endpoint(request):
        raise refusal

    with installed(("bad", Route(path="/acme", endpoint=endpoint))) as server:
        assert blames(server.client.get("/acme"), "bad", text)


def test_the_time_of_a_middleware_is_without_that_of_what_it_wraps():
    async def passes(app, scope, receive, send):
        await app(scope, receive, send)

    with installed(("fine", middleware(passes)), extension_seconds=0.1) as server:
        server.engine.delay = 0.3
        assert server.post(CHAT, ASK).status_code == 200
        assert faults(server) == {}


def test_a_middleware_may_refuse_and_see_errors_as_answers():
    statuses = []

    async def refuses(app, scope, receive, send):
        headers = dict(scope["headers"])
        if b"x-blocked" in headers:
            raise HTTPException(429, "not so fast", {"retry-after": "3"})

        async def noted(message):
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        await app(scope, receive, noted)

    with installed(("limit", middleware(refuses))) as server:
        refused = server.post(CHAT, ASK, headers={"x-blocked": "1"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
        assert refused.json()["error"]["message"] == "not so fast"
        assert server.post(CHAT, {}).status_code == 400
        assert server.client.get("/nowhere").status_code == 404
        assert server.post(CHAT, ASK).status_code == 200
        assert statuses == [400, 404, 200]
        assert faults(server) == {}


# Transforms


def test_transforms_change_requests_in_order_and_answers_in_reverse():
    def adding(letter):
        async def request(call, body):
            body["messages"].append({"role": "user", "content": letter})
            return body

        async def response(call, body):
            return {**body, "model": body["model"] + letter}

        def event(call, body):
            return {**body, "model": body["model"] + letter}

        return letter, Transform(request=request, response=response, event=event)

    with installed(adding("a"), adding("b"), served_names=["m"]) as server:
        assert server.post(CHAT, ASK).json()["model"] == "mba"
        messages, _, _ = server.engine.asked[-1]
        assert [message["content"] for message in messages] == ["Hi", "a", "b"]
        events = server.events(CHAT, {**ASK, "stream": True})
        assert {event["model"] for event in events} == {"mba"}


def test_an_event_may_be_left_out_and_may_hold_anything():
    text = 'data: {"x": 1} data: done'

    def event(call, body):
        return body if body["choices"][0]["delta"].get("content") else None

    with installed(("t", Transform(event=event))) as server:
        server.engine.text = text
        events = server.events(CHAT, {**ASK, "stream": True})
        assert "".join(e["choices"][0]["delta"]["content"] for e in events) == text


def test_a_transform_sees_who_calls_and_no_credentials():
    seen = []

    async def request(call, body):
        seen.append(call)
        return body

    with installed(("t", Transform(request=request))) as server:
        headers = {"authorization": "Bearer x", "x-api-key": "y", "cookie": "z", "x-team": "red"}
        server.post(CHAT, ASK, headers={**headers, "x-request-id": "mine"})
    (call,) = seen
    assert (call.path, call.client.name, call.request_id) == (CHAT, "anybody", "mine")
    assert call.headers["x-team"] == "red"
    assert not {"authorization", "x-api-key", "cookie"} & set(call.headers)


async def transform_raises(call, body):
    raise KeyError("secret")


async def transform_returns_none(call, body):
    return None


async def transform_breaks(call, body):
    return {**body, "mesages": []}


async def transform_hangs(call, body):
    await asyncio.sleep(3600)


async def unencodable(call, body):
    return {**body, "x": object()}


FAILING_TRANSFORMS = [
    (Transform(request=transform_raises), "its request transform failed: KeyError"),
    (Transform(request=transform_returns_none), "it returned a NoneType, expected a dict"),
    (Transform(request=transform_breaks), "one of plugin 'p0', plugin 'p1'"),
    (Transform(request=transform_hangs), "it took more than 0.2 s"),
    (Transform(response=transform_raises), "its response transform failed: KeyError"),
    (Transform(response=transform_returns_none), "it returned a NoneType, expected a dict"),
    (Transform(response=unencodable), "it returned what JSON cannot hold"),
]


def test_a_fault_of_a_transform_ends_that_request_alone():
    def only(case, function):
        async def change(call, body):
            return await function(call, body) if call.headers["x-case"] == case else body

        return function and change

    plugins = [
        (f"p{i}", Transform(request=only(str(i), t.request), response=only(str(i), t.response)))
        for i, (t, _) in enumerate(FAILING_TRANSFORMS)
    ]
    with installed(*plugins, extension_seconds=0.2) as server:
        for i, (_, text) in enumerate(FAILING_TRANSFORMS):
            response = server.post(CHAT, ASK, headers={"x-case": str(i)})
            assert blames(response, f"p{i}", text)
            assert "secret" not in response.text
        assert server.post(CHAT, ASK, headers={"x-case": "none"}).status_code == 200
        assert sum(faults(server).values()) == len(FAILING_TRANSFORMS)
        assert (server.engine.open, server.service.load.open) == (0, 0)


def test_a_transform_that_makes_a_wrong_body_is_named():
    with installed(("bad", Transform(request=transform_breaks))) as server:
        assert blames(server.post(CHAT, ASK), "bad", "it made a wrong body of a right one")


def test_a_wrong_request_is_not_blamed_on_a_transform():
    async def request(call, body):
        return body

    with installed(("fine", Transform(request=request))) as server:
        response = server.post(CHAT, {**ASK, "mesages": []})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "mesages")
        assert faults(server) == {}


def test_a_request_transform_may_refuse_and_a_response_transform_may_not():
    async def refuses(call, body):
        raise RequestError("messages: not on Sundays")

    with installed(("strict", Transform(request=refuses))) as server:
        error = server.post(CHAT, ASK).json()["error"]
        assert (error["message"], error["param"]) == ("messages: not on Sundays", "messages")
        assert faults(server) == {}
    with installed(("strict", Transform(response=refuses))) as server:
        assert blames(server.post(CHAT, ASK), "strict", "response transform failed: RequestErr")


FAILING_EVENTS = [
    (lambda call, body: 1 / 0, "its event transform failed: ZeroDivisionError"),
    (lambda call, body: [body], "it returned a list, expected a dict"),
    (lambda call, body: {"x": object()}, "it returned what JSON cannot hold"),
]


def test_a_fault_in_a_stream_is_its_last_event():
    def event(call, body):
        third = body["choices"][0]["delta"].get("content") == " there"
        return FAILING_EVENTS[int(call.headers["x-case"])][0](call, body) if third else body

    with installed(("bad", Transform(event=event))) as server:
        for case, (_, text) in enumerate(FAILING_EVENTS):
            headers = {"x-case": str(case)}
            *begun, last = server.events(CHAT, {**ASK, "stream": True}, headers=headers)
            assert len(begun) == 2
            assert last["error"]["type"] == "plugin_error"
            assert text in last["error"]["message"]
        assert faults(server) == {"bad": 3}
        assert server.engine.aborted == 3


def test_a_transform_is_notified_of_the_end_of_each_call():
    ends = []

    async def request(call, body):
        if body["messages"][0]["content"] == "no":
            raise RequestError("messages: not today")
        return body

    def event(call, body):
        third = body["choices"][0]["delta"].get("content") == " there"
        if third and call.headers.get("x-case") == "breaks":
            raise KeyError("x")
        return body

    watching = Transform(
        request=request, event=event, end=lambda call, how: ends.append((call.request_id, how))
    )
    with installed(("watching", watching)) as server:
        streamed = {**ASK, "stream": True}
        assert server.post(CHAT, ASK, headers={"x-request-id": "whole"}).status_code == 200
        server.events(CHAT, streamed, headers={"x-request-id": "streamed"})
        server.events(CHAT, streamed, headers={"x-request-id": "broken", "x-case": "breaks"})
        refused = {"messages": [{"role": "user", "content": "no"}]}
        assert server.post(CHAT, refused, headers={"x-request-id": "no"}).status_code == 400
        wrong = {**ASK, "temperature": "hot"}
        assert server.post(CHAT, wrong, headers={"x-request-id": "wrong"}).status_code == 400
        wait_until(lambda: len(ends) == 5)
    assert dict(ends) == {
        "whole": "finished",
        "streamed": "finished",
        "broken": "failed",
        "no": "failed",
        "wrong": "failed",
    }


def test_a_transform_is_notified_of_a_client_that_went():
    ends = []
    watching = ("watching", Transform(end=lambda call, how: ends.append(how)))
    engine = HeldEngine(config=configured(), extensions=(watching,), at_once=1)
    with running(engine) as server:
        body = {**ASK, "stream": True}
        with server.client.stream("POST", CHAT, json=body) as answer:
            next(answer.iter_text())
        wait_until(lambda: ends == ["aborted"])
        engine.go_on.set()


# Authenticators


def knowing(name, key, **order):
    async def authenticate(headers, path):
        known = headers.get("authorization") == f"Bearer {key}"
        return Client(name=name, tags={"of": name}) if known else None

    return name, Authenticator(authenticate=authenticate, **order)


def test_authenticators_are_asked_in_order_until_one_knows():
    with installed(knowing("a", "k1"), knowing("b", "k1", before=["a"]), knowing("c", "k2")) as s:

        def tags(key):
            response = s.post(CHAT, ASK, headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 200
            return s.engine.asked[-1][2]["tags"]

        assert tags("k1") == {"of": "b", "tenant": "b"}
        assert tags("k2") == {"of": "c", "tenant": "c"}
        refused = s.post(CHAT, ASK)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert s.client.get("/health").json() == {"status": "ok"}
        assert s.client.get("/openapi.json").status_code == 401


async def auth_raises(headers, path):
    raise ValueError("secret")


async def auth_returns_true(headers, path):
    return True


async def auth_hangs(headers, path):
    await asyncio.sleep(3600)


def test_an_authenticator_that_fails_refuses():
    """Also where the next one would know the client; open routes stay open."""
    cases = {
        auth_raises: "its authenticator failed: ValueError",
        auth_returns_true: "it returned a bool, expected a Client or None",
        auth_hangs: "it took more than 0.2 s",
    }

    async def authenticate(headers, path):
        return await globals()[headers["x-case"]](headers, path)

    bad = ("bad", Authenticator(authenticate=authenticate))
    with installed(bad, knowing("fine", "k"), extension_seconds=0.2) as server:
        for case, text in cases.items():
            headers = {"authorization": "Bearer k", "x-case": case.__name__}
            assert blames(server.post(CHAT, ASK, headers=headers), "bad", text)
            before = server.service.faults.counts["bad"]
            for path in ("/health", "/ready", "/"):
                assert server.client.get(path, headers=headers).status_code == 200
            assert server.service.faults.counts["bad"] == before + 3
        assert server.engine.asked == []


def test_an_authenticator_that_takes_its_time_does_not_delay_probes():
    bad = ("bad", Authenticator(authenticate=auth_hangs))
    with installed(bad, extension_seconds=3600) as server:
        assert server.client.get("/health").json() == {"status": "ok"}


def test_an_authenticator_may_refuse_with_its_own_message():
    async def authenticate(headers, path):
        raise HTTPException(403, "your account is closed")

    with installed(("bank", Authenticator(authenticate=authenticate))) as server:
        response = server.post(CHAT, ASK)
        assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")
        assert response.json()["error"]["message"] == "your account is closed"


def test_other_requests_go_on_while_one_plugin_fails():
    async def sometimes(app, scope, receive, send):
        if (b"x-bad", b"1") in scope["headers"]:
            raise ValueError("x")
        await app(scope, receive, send)

    with installed(("bad", middleware(sometimes))) as server:
        server.engine.delay = 0.05
        with server.client.stream("POST", CHAT, json={**ASK, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            for _ in range(3):
                assert server.post(CHAT, ASK, headers={"x-bad": "1"}).status_code == 500
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert faults(server) == {"bad": 3}
        assert server.client.get("/health").json()["status"] == "ok"


def listed(engine):
    """Give an engine a manifest with this module as the plugin `acme`."""
    entry = PluginEntry(
        kind="hooks",
        name="acme",
        value=f"{__name__}:Acme",
        distribution="acme",
        version="1.0",
        origin="default",
        options={},
        place=0,
    )
    engine.manifest = Manifest(hardpoint="9.9", entries=(entry,))
    slow = PluginsConfig(slow_seconds=0.1)
    engine.config = msgspec.structs.replace(engine.config, plugins=slow)
    return engine


HELD_UNTIL = []
"""Condition that ends what holds the event loop."""


def holds():
    wait_until(HELD_UNTIL[-1])


async def holds_later():
    holds()


SCHEDULED = {
    "call_soon": lambda loop: loop.call_soon(holds),
    "call_later": lambda loop: loop.call_later(0.01, holds),
    "create_task": lambda loop: loop.create_task(holds_later()),
}


@pytest.mark.parametrize("how", SCHEDULED)
def test_a_callback_that_holds_the_event_loop_is_named(caplog, clock, how):
    async def endpoint(request):
        SCHEDULED[how](asyncio.get_running_loop())
        return PlainTextResponse("ok")

    with running(
        listed(FakeEngine(config=configured(), hooks=(Acme(route(endpoint=endpoint)),)))
    ) as server:
        reports = server.service.faults.slow
        HELD_UNTIL.append(lambda: reports)
        for _ in range(2):
            reports.clear()
            assert server.client.get("/acme").text == "ok"
            wait_until(lambda: reports)
            slow = server.client.get("/health").json()["slow"]
    name = "holds_later" if how == "create_task" else "holds"
    text = (
        f"plugin 'acme' (acme 1.0, {__name__}:Acme): its function {__name__}:{name}, which the "
        "event loop called, has blocked the server for more than 0.1 s, in which it answered no "
        "request; hand long work to asyncio.to_thread"
    )
    assert [record.message for record in caplog.records] == [text]
    assert slow == {"acme": text}


def stops(error):
    raise error


async def stops_in_task(error):
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("how", ["call_soon", "create_task"])
def test_what_stops_the_event_loop_does_not_end_the_server(caplog, how, error):
    tasks = []

    async def endpoint(request):
        loop = asyncio.get_running_loop()
        if how == "call_soon":
            loop.call_soon(stops, error("of acme"))
        else:
            tasks.append(loop.create_task(stops_in_task(error("of acme"))))
        return PlainTextResponse("ok")

    with running(
        listed(FakeEngine(config=configured(), hooks=(Acme(route(endpoint=endpoint)),)))
    ) as server:
        for count in (1, 2):
            assert server.client.get("/acme").text == "ok"
            assert server.client.get("/health").status_code == 200
            # uvloop answers what it has read before it stops and the fault is counted.
            wait_until(lambda count=count: faults(server) == {"acme": count})
    # Read here, or asyncio reports them in the midst of whatever test runs when they are collected.
    ended = [type(task.exception()) for task in tasks]
    assert ended == ([error] * 2 if how == "create_task" else [])
    name = "stops" if how == "call_soon" else "stops_in_task"
    text = (
        f"plugin 'acme' (acme 1.0, {__name__}:Acme): its function {__name__}:{name} raised "
        f"{error.__name__}, which stopped the event loop; the server goes on"
    )
    assert text in [record.message for record in caplog.records]
    assert server.code == 0
